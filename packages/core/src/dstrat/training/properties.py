"""Public attributes of a Trainer beside its methods: settings, ranks, stage, counters, values."""

from __future__ import annotations

import math
import signal
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import MisuseError
from dstrat.interfaces.keywords import NamedArguments
from dstrat.interfaces.optimizers import Optimization
from dstrat.training.callbacks.early_stopping import EarlyStopping
from dstrat.training.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from dstrat.training.evaluation_results import MetricValues
from dstrat.training.loggers.defaults import complete_loggers
from dstrat.training.run import RunningStage, TrainerFn, TrainerState, TrainerStatus
from dstrat.training.settings import setting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from dstrat.checkpoint.paths import CheckpointPath, LocalPath
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.optimizers import SchedulerConfig
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.launch.recovery import FailedAttempt
    from dstrat.resolve import Plan, Request
    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.callbacks.prediction_writer import PredictionWriter
    from dstrat.training.callbacks.progress_bar import ProgressBar
    from dstrat.training.loggers.logger import Logger
    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.loops.fit_loop import FitLoop
    from dstrat.training.metrics.publisher import Metrics
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.run import Run, Stage
    from dstrat.training.settings import Duration, TrainerSettings


class TrainerProperties(NamedArguments):
    """The attributes of a Trainer that callbacks and modules read: of its settings, its strategy and its run.

    Attributes:
        arguments: The arguments that differ from their defaults, as plain values and names of classes.
        request: What the user asked for, of which the plan is made.
        plan: The components of the run, each with the reason for its choice.
        strategy: The strategy.
        settings: The settings, which the attributes by the names of the constructor's arguments read.
        callbacks: The callbacks, in the order of their calls.
        loggers: The loggers.
        run: State of the current run, or of the last one.
    """

    arguments: dict[str, Any]
    request: Request
    plan: Plan
    strategy: Strategy
    settings: TrainerSettings
    callbacks: list[Callback]
    loggers: list[Logger]
    run: Run

    max_epochs: int = setting("limits", "max_epochs")
    max_steps: int = setting("limits", "max_steps")
    min_epochs: int = setting("limits", "min_epochs")
    min_steps: int = setting("limits", "min_steps")
    max_time: Duration | None = setting("limits", "max_time")
    fast_dev_run: int = setting("limits", "fast_dev_run")
    limit_train_batches: int | float = setting("data", "limit_train_batches", default=1.0)
    limit_val_batches: int | float = setting("data", "limit_val_batches", default=1.0)
    limit_test_batches: int | float = setting("data", "limit_test_batches", default=1.0)
    limit_predict_batches: int | float = setting("data", "limit_predict_batches", default=1.0)
    overfit_batches: int | float = setting("data", "overfit_batches")
    reload_dataloaders_every_n_epochs: int = setting("data", "reload_dataloaders_every_n_epochs")
    use_distributed_sampler: bool = setting("data", "use_distributed_sampler")
    check_val_every_n_epoch: int | None = setting("evaluation", "check_val_every_n_epoch")
    val_check_interval: int | float | Duration = setting("evaluation", "val_check_interval", default=1.0)
    num_sanity_val_steps: int = setting("evaluation", "num_sanity_val_steps")
    inference_mode: bool = setting("evaluation", "inference_mode")
    accumulate_grad_batches: int = setting("steps", "accumulate_grad_batches")
    gradient_clip_val: float | None = setting("steps", "gradient_clip_val")
    gradient_clip_algorithm: ClipAlgorithm = setting("steps", "gradient_clip_algorithm")
    deterministic: bool | Literal["warn"] | None = setting("steps", "deterministic")
    benchmark: bool | None = setting("steps", "benchmark")
    sync_batchnorm: bool = setting("steps", "sync_batchnorm")
    detect_anomaly: bool = setting("steps", "detect_anomaly")
    default_root_dir: CheckpointPath = setting("output", "default_root_dir")
    log_every_n_steps: int = setting("output", "log_every_n_steps")
    barebones: bool = setting("output", "barebones")

    # Arguments that cannot be changed, as the launcher and the strategy are made for them

    @property
    def max_restarts(self) -> int:
        """How often all ranks are restarted after one has failed."""
        return self.request.max_restarts

    @property
    def elastic(self) -> bool | Literal["replace"]:
        """Whether the others go on in their processes when a rank was killed; ``"replace"`` if a new one joins."""
        return self.request.elastic

    @property
    def preemption_deadline(self) -> float | None:
        """Seconds from SIGTERM or SIGUSR1 until a scheduler kills the job; None where none does."""
        return self.request.preemption_deadline

    # Ranks and devices

    @property
    def world_size(self) -> int:
        """Number of processes of the job, also before their start and after their end."""
        return self.run.world_size

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self.strategy.global_rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.strategy.local_rank

    @property
    def node_rank(self) -> int:
        """Rank of this machine."""
        return self.strategy.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this process has global rank 0."""
        return self.strategy.is_global_zero

    @property
    def ran_elsewhere(self) -> bool:
        """Whether the run is in other processes, which send its result back to this one."""
        return self.run.ran_elsewhere

    @property
    def num_devices(self) -> int:
        """Number of devices of this machine that the job uses."""
        return len(self.strategy.components.parallel_devices or (self.strategy.root_device,))

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this machine that the job uses."""
        devices = self.strategy.components.parallel_devices or (self.strategy.root_device,)
        # The CPU has no index, however often a job uses it.
        return [index if device.index is None else device.index for index, device in enumerate(devices)]

    @property
    def num_nodes(self) -> int:
        """Number of machines of the job."""
        return self.plan.num_nodes

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator."""
        return self.strategy.accelerator

    @property
    def precision(self) -> str:
        """The flag of the dtypes, such as ``"bf16-mixed"``."""
        return self.plan.precision

    @property
    def precision_plugin(self) -> Precision:
        """The precision."""
        return self.strategy.precision_plugin

    @property
    def failed_attempts(self) -> list[FailedAttempt]:
        """The attempts of this job, or of the last one, that ended with a failed rank; with ``max_restarts``."""
        if self.run.attempt is not None:  # in a rank; the launcher is in the process that started it
            return list(self.run.attempt.failed)
        return list(getattr(self.strategy.launcher, "failed_attempts", ()))  # a user's launcher may not have it

    @property
    def restart_count(self) -> int:
        """Number of restarts of the job so far, including those of torchrun."""
        cluster = self.strategy.components.cluster_environment
        return max(len(self.failed_attempts), 0 if cluster is None else cluster.attempt)

    # Stage and counters

    @property
    def stage(self) -> Stage:
        """The method that was called last: fit, validate, test or predict."""
        return self.run.stage

    @property
    def module(self) -> TrainModule | None:
        """The user's module, also after the run."""
        return self.run.module

    @property
    def datamodule(self) -> DataModule | None:
        """The user's data module; None without one."""
        return self.run.datamodule

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the run has loaded; None without one."""
        return self.run.ckpt_path

    @property
    def is_running(self) -> bool:
        """Whether a run is in progress in this process."""
        return self.run.is_running

    @property
    def evaluation_loop(self) -> EvaluationLoop | None:
        """The loop that validates, tests or predicts, also within a fit; None before its first use."""
        return self.run.evaluation_loop

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check of validation at the start of a fit is in progress."""
        return self.run.sanity_checking

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation loop is in progress, also within a fit."""
        return self.run.is_evaluating

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the last run."""
        return self.run.interrupted

    @property
    def metrics(self) -> Metrics:
        """The logged values of the run."""
        return self.run.metrics

    @property
    def should_stop(self) -> bool:
        """Set it to True in any process, and training ends after the same step in all of them.

        It has no effect before ``min_epochs`` and ``min_steps`` are done.
        """
        return self.run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.should_stop = value

    @property
    def status(self) -> TrainerStatus:
        """Progress of the last call of fit, validate, test or predict."""
        return self.run.status

    @property
    def state(self) -> TrainerState:
        """Status, method and stage, by Lightning's names."""
        # The run of a new Trainer has the stage "fit" before any call.
        fn = None if self.status is TrainerStatus.INITIALIZING else TrainerFn(self.stage)
        return TrainerState(status=self.status, fn=fn, stage=self._running_stage() if self.is_running else None)

    def _running_stage(self) -> RunningStage:
        if not self.is_fitting:
            return RunningStage(self.stage)
        if self.sanity_checking:
            return RunningStage.SANITY_CHECKING
        return RunningStage.VALIDATING if self.is_evaluating else RunningStage.TRAINING

    @property
    def is_fitting(self) -> bool:
        """Whether the stage is a fit, also during its validations, and after its end."""
        return self.run.is_fitting

    @property
    def training(self) -> bool:
        """Whether the module is being trained now, not validated."""
        return self._runs("fit") and not (self.is_evaluating or self.sanity_checking)

    @property
    def validating(self) -> bool:
        """Whether the module is being validated now, in a fit or by ``validate``; not in the sanity check."""
        return self._runs("validate") or (self._runs("fit") and self.is_evaluating and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Whether the module is being tested now."""
        return self._runs("test")

    @property
    def predicting(self) -> bool:
        """Whether the module is predicting now."""
        return self._runs("predict")

    @property
    def evaluating(self) -> bool:
        """Whether the module is being validated or tested now."""
        return self.validating or self.testing

    def _runs(self, stage: Stage) -> bool:
        return self.is_running and self.stage == stage

    @property
    def received_sigterm(self) -> bool:
        """Whether the current or the last run has received SIGTERM."""
        return self.run.interruption.requested == signal.SIGTERM

    @property
    def log_dir(self) -> LocalPath:
        """The folder of the first logger that has one; without such a logger ``default_root_dir``.

        Before a run only global rank 0 knows the folder of a logger: reading this attribute creates it.
        """
        return self.run.output_dir

    @property
    def fit_loop(self) -> FitLoop:
        """The training loop."""
        return self.run.fit_loop

    @property
    def current_epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self.run.fit_loop.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken."""
        return self.run.fit_loop.global_step

    @property
    def num_training_batches(self) -> int | None:
        """Number of training batches in an epoch; None if it is unknown."""
        return self.fit_loop.data.num_batches

    @property
    def is_last_batch(self) -> bool:
        """Whether the current training batch is the last one of the epoch."""
        return self.fit_loop.is_last_batch

    @property
    def num_val_batches(self) -> list[int | None]:
        """Number of batches of each validation loader, from ``on_train_start`` on; None for an unknown one."""
        loop = self.run.evaluation_loop
        return loop.num_batches if loop is not None and self.stage in ("fit", "validate") else []

    @property
    def num_sanity_val_batches(self) -> list[int | None]:
        """Number of batches of each validation loader in the sanity check; empty at other times."""
        return self._current_batches if self.sanity_checking else []

    @property
    def num_test_batches(self) -> list[int | None]:
        """Number of batches of each test loader; None for an unknown one."""
        return self._current_batches if self.stage == "test" else []

    @property
    def num_predict_batches(self) -> list[int | None]:
        """Number of batches of each prediction loader; None for an unknown one."""
        return self._current_batches if self.stage == "predict" else []

    @property
    def _current_batches(self) -> list[int | None]:
        return [] if self.run.evaluation_loop is None else self.run.evaluation_loop.current_batches

    @property
    def estimated_stepping_batches(self) -> float:
        """Number of optimizer steps until training ends; infinite if nothing ends it.

        For use in ``configure_optimizers``, such as in ``OneCycleLR(total_steps=...)``.

        Raises:
            MisuseError: There is no fit, during which the training loader can be made.
        """
        if self.fit_loop.data.loader is None:
            if self.status is TrainerStatus.INITIALIZING or not self.is_fitting:
                raise MisuseError("estimated_stepping_batches is known during a fit: read it in configure_optimizers")
            self.fit_loop.data.load()  # the loop uses this loader later
        limit = math.inf if self.max_steps < 0 else self.max_steps
        batches = self.fit_loop.data.num_batches
        if batches is None or self.max_epochs < 0:
            return limit
        return min(limit, self._count_steps(batches, self.max_epochs))

    def _count_steps(self, batches: int, epochs: int) -> int:
        """Return the number of optimizer steps in a number of epochs, from the number of batches in each."""
        for callback in self.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):
                return callback.count_steps(batches, epochs)
        return math.ceil(batches / self.accumulate_grad_batches) * epochs

    @property
    def train_dataloader(self) -> Any:
        """The training loader of this process; None before it is made."""
        return self.fit_loop.data.loader

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader of this process, or the list or dict of them, in a fit or in ``validate``."""
        return self._loaders_of("fit", "validate")

    @property
    def test_dataloaders(self) -> Any:
        """The test loader of this process, or the list or dict of them."""
        return self._loaders_of("test")

    @property
    def predict_dataloaders(self) -> Any:
        """The prediction loader of this process, or the list or dict of them."""
        return self._loaders_of("predict")

    def _loaders_of(self, *stages: Stage) -> Any:
        loop = self.run.evaluation_loop
        return loop.structure if loop is not None and self.stage in stages else None

    @property
    def predict_batch_indices(self) -> list[Any] | None:
        """Indices in the dataset of the samples of the current prediction batch; None if they are unknown.

        They are recorded for callbacks whose ``reads_batch_indices`` is True.
        """
        return None if self.run.evaluation_loop is None else self.run.evaluation_loop.batch_indices

    @property
    def lr_scheduler_configs(self) -> list[SchedulerConfig]:
        """The learning-rate schedulers of the fit, each with its interval; also after the end of the fit."""
        return self.strategy.lr_schedulers if self.strategy.optimizers else list(self._after_fit.schedulers)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the fit, also after its end; empty before the first fit.

        A hook of a fit may set others, which take the next step.

        Raises:
            MisuseError: The last fit ran in other processes, with which its optimizers have ended.
        """
        # The strategy forgets its own in teardown.
        return self.strategy.optimizers or list(self._after_fit.optimizers)

    @optimizers.setter
    def optimizers(self, optimizers: Iterable[Any]) -> None:
        if not (self.is_running and self.is_fitting):
            raise MisuseError(
                "trainer.optimizers was set outside of a fit, which begins with those of configure_optimizers: "
                "return them there, or set them in a hook of the fit"
            )
        self.strategy.optimizers = list(optimizers)

    @property
    def _after_fit(self) -> Optimization:
        if self.run.final_optimization is None and not self.is_running:
            raise MisuseError(
                f"the last fit ran in other processes (start_method={self.plan.start_method!r}), which have ended "
                "with their optimizers and schedulers: read them in a hook such as on_train_end, or choose "
                "start_method='popen', with which each rank runs the whole script"
            )
        return self.run.final_optimization or Optimization()

    @property
    def model(self) -> Any:
        """The module as wrapped by the strategy."""
        return self.strategy.model

    @property
    def lightning_module(self) -> TrainModule | None:
        """The user's module by Lightning's name: :attr:`module`."""
        return self.module

    @property
    def logger(self) -> Logger | None:
        """The first logger; None without one.  It can be set to one or several, or to False or None for none.

        One that is set in a run has a folder on global rank 0 only, until the next run.
        """
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, requested: Logger | Iterable[Logger] | bool | None) -> None:
        requested = False if requested is None else requested  # as in Lightning; of the argument, None is the default
        is_tried = self.fast_dev_run > 0
        self.loggers = complete_loggers(requested, self.default_root_dir, self.strategy, is_tried=is_tried)

    @property
    def writing_loggers(self) -> list[Logger]:
        """The loggers on global rank 0, which writes; none on other ranks."""
        return self.loggers if self.is_global_zero else []

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Latest value of each logged name."""
        return MetricValues(self.metrics.callback_values)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Latest values that loggers write, by name."""
        return MetricValues(self.metrics.written_values)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """Latest values that the progress bar shows, by name; reads them from the device."""
        return MetricValues(self.metrics.shown_values)

    @property
    def called_callbacks(self) -> list[Callback]:
        """The callbacks whose hooks are called: all, but in a trial run none that save checkpoints."""
        return self.run.called_callbacks

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback with a best checkpoint."""
        return self.run.checkpoint_callback

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """The callbacks that save checkpoints."""
        return self.run.checkpoint_callbacks

    @property
    def progress_bar_callback(self) -> ProgressBar | None:
        """The first ``ProgressBar``; None without one."""
        from dstrat.training.callbacks.progress_bar import ProgressBar  # only a Trainer with a bar has imported it

        return next((callback for callback in self.callbacks if isinstance(callback, ProgressBar)), None)

    @property
    def prediction_writer_callbacks(self) -> list[PredictionWriter]:
        """Every ``PredictionWriter``."""
        from dstrat.training.callbacks.prediction_writer import PredictionWriter

        return [callback for callback in self.callbacks if isinstance(callback, PredictionWriter)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first ``EarlyStopping``; None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[EarlyStopping]:
        """Every ``EarlyStopping``."""
        return [callback for callback in self.callbacks if isinstance(callback, EarlyStopping)]
