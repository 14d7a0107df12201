"""State of one run: a fit, validation, test or prediction in a process."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class RunContext:
    """The state of one run of a Trainer.

    The Trainer makes a context for each run, and keeps it until the next one.  Users read it through the Trainer's
    properties.

    Attributes:
        stage: The method that was called.
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

    stage: Stage = "fit"
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
