"""State of one run: a fit, validation, test or prediction in a process, and its status."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.publisher import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dstrat.interfaces.strategy import Strategy
    from dstrat.launch.recovery import Attempt, SavePoint
    from dstrat.training.hooks import HookRunner
    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.run_recorder import RunRecorder


Stage = Literal["fit", "validate", "test", "predict"]


# Status and stage of a Trainer, by Lightning's names


class _Text(str, Enum):  # Python 3.10 has no StrEnum
    """Constants that are equal to their values: users compare them with str."""

    def __str__(self) -> str:
        return str(self.value)


class TrainerStatus(_Text):
    """Progress of the last call of fit, validate, test or predict."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended, with or without an error."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Text):
    """The method that was called last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Text):
    """The current activity of a Trainer: a fit trains, and validates in between."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is a validation, a sanity check or a test."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """A snapshot of a Trainer's status.

    Attributes:
        status: Progress of the last call.
        fn: The method that was called last; None before the first call.
        stage: The current activity; None outside of a run.
    """

    status: TrainerStatus
    fn: TrainerFn | None
    stage: RunningStage | None

    @property
    def finished(self) -> bool:
        """Whether the last call has ended without an error."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last call has ended, with or without an error."""
        return self.status.stopped


@dataclass(kw_only=True)
class RunContext:
    """The state of one run of a Trainer.

    The Trainer makes a context for each run, and keeps it until the next one.  Users read it through the Trainer's
    properties.

    Attributes:
        status: Progress of the call.
        stage: The method that was called.
        should_stop: Whether the training is to end, once ``min_epochs`` and ``min_steps`` are done.
        metrics: The logged values.
        log_dir: The folder of rank 0's loggers; that of the last run until the ranks have agreed on one.
        module: The user's module.
        datamodule: The user's data module.
        sources: The sources of loaders.
        hooks: The hooks of callbacks and module; set when the run begins.
        ckpt_path: The checkpoint that the run has loaded.
        logged: The collection that the module's ``log`` writes to now.
        evaluation_loop: The loop that validates, tests or predicts.
        evaluation_batches: The number of its batches from each loader.
        return_predictions: Whether ``predict`` returns the results of the steps.
        beat: Notes progress of the run for hang detection; None where it is not watched.
        is_running: Whether the run is in progress in this process.
        is_evaluating: Whether the evaluation loop is in progress.
        sanity_checking: Whether the evaluation is the sanity check.
        interrupted: Whether a signal ended the run.
        attempt: The attempt of a job with ``max_restarts``; None without.
        save_point: From where this attempt continues the fit; None where it is the first one.
        save_seconds: Time that the last checkpoint has taken; 0 before the first.
        recorder: Writes the record of the run; None on other ranks than 0, and without a log folder.
        host_memory: Largest memory of this process before the run, in bytes.
    """

    status: TrainerStatus = TrainerStatus.INITIALIZING
    stage: Stage = "fit"
    should_stop: bool = False
    metrics: Metrics
    log_dir: Path | None = None
    module: TrainModule | None = None
    datamodule: DataModule | None = None
    sources: DataSources | None = None
    hooks: HookRunner = field(init=False, repr=False, compare=False)
    ckpt_path: str | None = None
    logged: LoggedValues = field(default_factory=lambda: LoggedValues(training=True))
    evaluation_loop: EvaluationLoop | None = None
    evaluation_batches: list[int | None] = field(default_factory=list)
    return_predictions: bool = True
    beat: Callable[[], None] | None = None
    is_running: bool = False
    is_evaluating: bool = False
    sanity_checking: bool = False
    interrupted: bool = False
    attempt: Attempt | None = None
    save_point: SavePoint | None = None
    save_seconds: float = 0.0
    recorder: RunRecorder | None = None
    host_memory: int = 0

    def reset_metrics(self, strategy: Strategy) -> None:
        """Discard all logged values."""
        self.metrics = Metrics(strategy)

    def log_to(self, logged: LoggedValues) -> None:
        """Direct the module's ``log`` to a collection; the values of other collections stay readable."""
        self.logged = logged
        self.metrics.follow(logged)
