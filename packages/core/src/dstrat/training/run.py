"""State of a run: a fit, validation, test or prediction in a process, and its status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dstrat.checkpoint.paths import home_path, local_folder
from dstrat.interfaces.optimizers import Optimization
from dstrat.training.loops.stopping import Interruption
from dstrat.training.metrics.publisher import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from dstrat.checkpoint.paths import LocalPath
    from dstrat.launch.recovery import Attempt, SavePoint
    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.hooks import HookRunner
    from dstrat.training.loggers.logger import Logger
    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.loops.fit_loop import FitLoop
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.metrics.logged import LoggedValues
    from dstrat.training.metrics.publisher import Publisher
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.profilers.profiler import Profiler
    from dstrat.training.run_beginning import RunBeginning
    from dstrat.training.run_recorder import RunRecorder
    from dstrat.training.settings import TrainerSettings
    from dstrat.training.trainer import Trainer

R = TypeVar("R")
B = TypeVar("B")

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


# State of the end of a fit, on the CPU, for a checkpoint after the fit


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalState:
    """The state that the strategy frees at the end of a fit; module, counters and callbacks stay in the Trainer.

    Tensors are on the CPU.  On other devices they are copied to it, which takes as much host memory as the optimizers'
    state takes on the device (8 bytes per parameter for Adam in float32).  The Trainer's optimizers, which users may
    read after a fit, share these tensors.

    Attributes:
        optimization: The state of optimizers, schedulers and precision; empty in processes that do not write it.
        rank_state: The state of this rank.
        error: The error that prevents a checkpoint of the state; None without one.
        weights_of: The checkpoint whose weights an evaluation has since loaded into the module; None without one.
        loaded_by: The stage of that evaluation.
    """

    optimization: dict[str, Any]
    rank_state: dict[str, Any]
    error: Exception | None = None
    weights_of: str | Path | None = None
    loaded_by: str = ""

    def with_weights_of(self, path: str | Path, stage: str) -> FinalState:
        """Return the final state after a stage has loaded the weights of a checkpoint into the module."""
        rank_state = {**self.rank_state, "buffers": {}}  # the module has the checkpoint's buffers now
        return replace(self, rank_state=rank_state, weights_of=path, loaded_by=stage)


# A run


class Run:
    """A run: everything that changes during a fit, validation, test or prediction in a process.

    The Trainer makes a run for each call, and keeps it until the next one.  Loops, metrics and checkpoints get the run;
    hooks get the Trainer, whose properties read the run.

    Args:
        trainer: Has settings and components, and is passed to hooks.
        stage: The method that was called: fit, validate, test or predict.
        sources: The sources of module and loaders; None before the first call.
        previous: The Trainer's run before this one, which an evaluation takes the state of the last fit from.
        return_predictions: Whether ``predict`` returns the results of the steps.

    Attributes:
        module: The user's module.
        datamodule: The user's data module.
        status: Progress of the call.
        is_running: Whether the run is in progress in this process.
        is_saved_alone: Whether this rank saves without the others, of which a hook cannot use collectives.
        is_evaluating: Whether the evaluation loop is in progress.
        sanity_checking: Whether the evaluation is the sanity check.
        should_stop: Whether the training is to end, once ``min_epochs`` and ``min_steps`` are done.
        interrupted: Whether a signal ended the run.
        interruption: Defers signals that arrive while batches are read; of all runs of a Trainer, as it restores the
            handlers from before an interrupted one.
        hooks: The hooks of callbacks and module.
        beat: Notes progress of the run for hang detection; None where it is not watched.
        evaluation_loop: The loop that validates, tests or predicts.
        metrics: The logged values.
        logged: The collection that the module's ``log`` writes to now.
        publisher: Passes logged values to callbacks and loggers.
        log_dir: The folder of rank 0's loggers; that of the last run until the ranks have agreed on one.
        ckpt_path: The checkpoint that the run has loaded.
        attempt: The attempt of a job with ``max_restarts``; None without.
        save_point: From where this attempt continues the fit; None where it is the first one.
        save_seconds: Time that the last checkpoint has taken; 0 before the first.
        beginning: The state in which an elastic fit has begun; None in other runs.
        sizes: With how many ranks an elastic fit can go on; empty before its loader is made.
        scaled_settings: By name, the user's value of a Trainer's setting, and the one that fewer ranks of an elastic
            fit train with.
        recorder: Writes the record of the run; None on other ranks than 0, and without a log folder.
        host_memory: Largest memory of this process before the run, in bytes.
        final_world_size: Number of processes at the end, which an elastic fit may have lost some of; 0 before.
        final_optimization: Optimizers and schedulers of the last fit; None where it ran in other processes.
        final_state: State of the end of the last fit, for a checkpoint; None where none can be saved.
        strategy: The strategy.
        plan: The components of the run.
    """

    module: TrainModule  # None before the first call, when there are no loops and steps
    sources: DataSources  # likewise
    # Set in the process of the run, when it begins.
    hooks: HookRunner
    logged: LoggedValues
    publisher: Publisher

    # Of the Trainer.  Users change these within a run too; attrgetter is no Python call in a step.
    settings: TrainerSettings = property(attrgetter("trainer.settings"))  # type: ignore[assignment]
    callbacks: list[Callback] = property(attrgetter("trainer.callbacks"))  # type: ignore[assignment]
    loggers: list[Logger] = property(attrgetter("trainer.loggers"))  # type: ignore[assignment]
    profiler: Profiler | None = property(attrgetter("trainer.profiler"))  # type: ignore[assignment]

    def __init__(
        self,
        trainer: Trainer,
        stage: Stage = "fit",
        sources: DataSources | None = None,
        *,
        previous: Run | None = None,
        return_predictions: bool = True,
    ) -> None:
        self.stage: Stage = stage
        self.is_fitting = stage == "fit"
        # In this order, with the Trainer last: an object that cannot be sent to another process is named by the first.
        self.module = None if sources is None else sources.module  # type: ignore[assignment]
        self.datamodule: DataModule | None = None if sources is None else sources.datamodule
        self.sources = sources  # type: ignore[assignment]
        self.return_predictions = return_predictions
        self.status = TrainerStatus.INITIALIZING if sources is None else TrainerStatus.RUNNING
        self.is_running = self.is_saved_alone = self.is_evaluating = self.sanity_checking = False
        self.should_stop = self.interrupted = False
        self.evaluation_loop: EvaluationLoop | None = None
        self.beat: Callable[[], None] | None = None
        self.metrics = Metrics(trainer.strategy)
        self.ckpt_path: str | None = None
        self.attempt: Attempt | None = None
        self.save_point: SavePoint | None = None
        self.save_seconds = 0.0
        self.beginning: RunBeginning | None = None
        self.sizes: list[int] = []
        self.scaled_settings: dict[str, tuple[Any, Any]] = {}
        self.recorder: RunRecorder | None = None
        self.host_memory = 0
        self.log_dir: Path | None = None
        self.final_world_size = 0
        self.final_optimization: Optimization | None = Optimization()
        self.final_state: FinalState | None = None
        if previous is None:
            self.interruption = Interruption(trainer.preemption_deadline)
        else:
            self.interruption, self.log_dir = previous.interruption, previous.log_dir
            if not self.is_fitting:
                self.fit_loop, self.final_optimization = previous.fit_loop, previous.final_optimization
                # Not if another module is evaluated: save_checkpoint would mix the states of both.
                self.final_state = previous.final_state if self.module is previous.module else None
        self.strategy, self.plan = trainer.strategy, trainer.plan
        self.trainer = trainer

    @cached_property
    def fit_loop(self) -> FitLoop:
        """The training loop; in an evaluation that of the last fit."""
        from dstrat.training.loops.fit_loop import FitLoop  # making a Trainer stays fast

        return FitLoop(self)

    def drop_loops(self) -> None:
        """Release the loops of a fit that is over, with their loaders: workers end with the last reference."""
        # They are forks, which keep connections of this process open, also where it has closed them.
        loop: FitLoop | None = vars(self).pop("fit_loop", None)
        if loop is not None:
            loop.data.close()
        if self.evaluation_loop is not None:
            self.evaluation_loop.loaders = []
            self.evaluation_loop = None

    # The job

    @property
    def world_size(self) -> int:
        """Number of processes of the job, also before their start and after their end."""
        # The strategy of a process that is not launched yet has this process alone.
        if self.is_running:
            return self.strategy.world_size
        return self.final_world_size or self.plan.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.strategy.is_global_zero

    @property
    def ran_elsewhere(self) -> bool:
        """Whether the run is in other processes, which send its result back to this one."""
        return self.strategy.launcher is not None and not self.strategy.launcher.runs_here

    # Values and files

    def reset_metrics(self) -> None:
        """Discard all logged values."""
        self.metrics = Metrics(self.strategy)

    def log_to(self, logged: LoggedValues) -> None:
        """Direct the module's ``log`` to a collection; the values of other collections stay readable."""
        self.logged = logged
        self.metrics.follow(logged)

    @property
    def output_dir(self) -> LocalPath:
        """The folder of the first logger that has one; without such a logger ``default_root_dir``.

        Before a run only global rank 0 knows the folder of a logger: reading this attribute creates it.
        """
        folder = self.log_dir or next(filter(None, (logger.log_dir for logger in self.loggers)), None)
        return home_path(
            folder or local_folder(self.settings.output.default_root_dir)
        )  # a user's logger may have a str

    # Callbacks and profiler

    @property
    def called_callbacks(self) -> list[Callback]:
        """The callbacks whose hooks are called: all, but in a trial run none that save checkpoints."""
        is_trial = self.settings.limits.fast_dev_run
        return [callback for callback in self.callbacks if not (is_trial and callback.saves_checkpoints)]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback with a best checkpoint."""
        return next((callback for callback in self.callbacks if hasattr(callback, "best_model_path")), None)

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """The callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if callback.saves_checkpoints]

    def profiled(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that the profiler measures; without a profiler the function itself."""
        return function if self.profiler is None else self.profiler.timed(name, function)

    def profiled_batches(self, batches: Iterable[B]) -> Iterable[B]:
        """Return batches whose fetching the profiler measures; without a profiler the batches themselves."""
        return batches if self.profiler is None else _each(self.profiled("next_batch", iter(batches).__next__))


def _each(following: Callable[[], B]) -> Iterator[B]:
    """Yield the results of a function until it raises StopIteration."""
    # iter(function, sentinel) would compare each batch with the sentinel.
    while True:
        try:
            item = following()
        except StopIteration:
            return
        yield item
