"""The Trainer: arguments, plan, and the launch of runs."""
# Imports that only a run needs are in methods: making a Trainer and printing its plan stay fast.

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.checkpoint.paths import as_path
from dstrat.data.limits import check_count
from dstrat.errors import DstratError, MisuseError
from dstrat.interfaces.keywords import refuse_keywords
from dstrat.interfaces.optimizers import read_optimizers
from dstrat.launch.tracebacks import fold_frames
from dstrat.resolve import Request, resolve_request
from dstrat.training.arguments import (
    RETIRED_ARGUMENTS,
    RETIRED_ARGUMENTS_OF_RUNS,
    changed_arguments,
    check_arguments,
    check_elastic,
    check_ends_of_job,
    check_preemption,
    resolve_features,
    warn_of_variables,
)
from dstrat.training.callbacks.defaults import complete_callbacks
from dstrat.training.callbacks.timer import Timer
from dstrat.training.hooks import overrides
from dstrat.training.loggers.defaults import complete_loggers
from dstrat.training.profilers.defaults import make_profiler
from dstrat.training.properties import TrainerProperties
from dstrat.training.run import Run, TrainerStatus
from dstrat.training.settings import (
    DataLimits,
    EvaluationSettings,
    OutputSettings,
    RunLimits,
    StepSettings,
    TrainerSettings,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from typing_extensions import Never

    from dstrat.interfaces.accelerator import Accelerator, Devices
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.optimizers import Optimization
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.checkpoint.path import CheckpointRequest
    from dstrat.training.loggers.logger import Logger
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.profilers.profiler import Profiler
    from dstrat.training.run import Stage
    from dstrat.training.settings import Duration

    Plugin = Precision | ClusterEnvironment | CheckpointIO | str

DEFAULT_MAX_EPOCHS = 1000


class Trainer(TrainerProperties):
    """Training and evaluation of a module with a strategy, on any number of devices.

    The constructor chooses all components: ``print(trainer.plan)`` shows each choice with its reason, and a combination
    that cannot work is an error before anything starts.

    Args:
        accelerator: Hardware: an alias (``"cpu"``, ``"gpu"``, ``"auto"`` ...) or an Accelerator.
        strategy: Distribution of the training: an alias (``"ddp"``, ``"auto"`` ...), which options may follow
            (``"fsdp(cpu_offload=True)"``), or a Strategy.
        devices: Number of devices of each machine, or their indices: ``4``, ``"4"``, ``[0, 1]``, ``"0,1"``, ``-1``,
            ``"auto"``.
        num_nodes: Number of machines.
        precision: ``"32-true"``, ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"``, ``"bf16-mixed"``, also
            ``16``, ``32``, ``64`` and ``"bf16"``.
        plugins: Custom components: a Precision, a ClusterEnvironment, a CheckpointIO, a Launcher; at most one of each
            kind.
        logger: One or several loggers; True is a CSV logger, False none.
        callbacks: One or several callbacks.
        max_epochs: Number of epochs after which training stops; -1 is no limit.  By default 1000, and no
                limit with ``max_steps``, ``max_time`` or a :class:`~dstrat.callbacks.Timer` that has a duration.
        max_steps: Number of optimizer steps after which training stops; -1 is no limit.
        min_epochs: Number of epochs before which ``should_stop`` has no effect.
        min_steps: Number of optimizer steps before which ``should_stop`` has no effect.
        max_time: Time after which training stops: ``"DD:HH:MM:SS"``, a timedelta, or a dict such as ``{"hours": 8}``.
        limit_train_batches: Number of training batches in an epoch, or a fraction of them as a float.
        limit_val_batches: The same for each validation loader.
        limit_test_batches: The same for each test loader.
        limit_predict_batches: The same for each prediction loader.
        overfit_batches: Number or fraction of batches to train on in every epoch, in fixed order, and to validate on;
            0 is off.
        fast_dev_run: Number of batches of a trial run of everything (True is 1), with silent loggers, and without
            callbacks that save checkpoints.
        check_val_every_n_epoch: Epochs between validations; None counts ``val_check_interval`` across epochs.
        val_check_interval: Number of batches between validations in such an epoch, or a fraction of the epoch as a
            float, or a time in the form of ``max_time`` independent of epochs; by default the end of the epoch.
        num_sanity_val_steps: Number of validation batches to try before training starts; -1 is all.
        log_every_n_steps: Optimizer steps between two writes of step values to the loggers; 0 writes none.
        accumulate_grad_batches: Number of batches whose gradients make up one optimizer step.
        gradient_clip_val: Maximal norm or value of gradients; None and 0 do not clip.
        gradient_clip_algorithm: ``"norm"``, the default, or ``"value"``.
        deterministic: Whether operations without a deterministic implementation are errors; ``"warn"`` only warns.
        benchmark: Whether cuDNN searches for its fastest algorithms; None leaves torch's setting.
        sync_batchnorm: Whether batch-norm layers synchronize their statistics between all processes.
        detect_anomaly: Whether the first NaN is an error that names its module; slow.
        profiler: ``"simple"`` for a table of times, ``"advanced"`` for a table of every function, ``"torch"`` for a
            trace, or a Profiler.
        reload_dataloaders_every_n_epochs: Epochs after which the module or data module makes new loaders; 0 is never.
        use_distributed_sampler: Whether loaders are divided between processes.
        inference_mode: Whether validate, test and predict run under ``torch.inference_mode`` instead of ``no_grad``;
            validation within a fit always has ``no_grad``.
        enable_progress_bar: Whether to show a progress bar.
        enable_model_summary: Whether to print the layers before training.
        enable_checkpointing: Whether to save a checkpoint of the last epoch without a ModelCheckpoint.  False conflicts
            with a ModelCheckpoint, as the two arguments above conflict with their callbacks.
        default_root_dir: Folder of logs and checkpoints; the working directory by default.  If it is a URL of a store
            that fsspec supports, such as ``"s3://bucket/run"``, logs go to the working directory.
        barebones: Whether everything that costs time beside training is off: progress bar, summary, logger,
            checkpoints, sanity check and logging.  It conflicts with each of these arguments, a profiler,
            ``detect_anomaly`` and ``fast_dev_run``.
        max_restarts: How often all ranks of this machine are restarted after one has failed.  Training resumes from the
            newest complete checkpoint of this fit, at the same sample.
        elastic: Whether the other ranks go on in their processes when one was killed, as fewer ranks with the same
            global batch, from the newest complete checkpoint.  It counts as one of ``max_restarts``.  With
            ``"replace"`` a new process takes the place of the killed one as soon as it has started; needs an
            InMemoryCheckpoint.
        preemption_deadline: Seconds from SIGTERM or SIGUSR1 until a scheduler kills the job.  On such a signal the
            ranks save a checkpoint in the folder of the first ModelCheckpoint, and stop within this time; after a
            complete run SIGUSR1 has no effect.  Without a deadline SIGUSR1 does not stop a run.

    Raises:
        DstratError: The request is not possible; the message says what is.
    """

    retired_arguments = RETIRED_ARGUMENTS

    def __init__(
        self,
        *,
        accelerator: Accelerator | str = "auto",
        strategy: Strategy | str = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Precision | str | int | None = None,
        plugins: Plugin | Sequence[Plugin] | None = None,
        logger: Logger | Sequence[Logger] | bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        max_time: Duration | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0,
        fast_dev_run: int | bool = False,
        check_val_every_n_epoch: int | None = 1,
        val_check_interval: int | float | Duration | None = None,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        sync_batchnorm: bool = False,
        detect_anomaly: bool = False,
        profiler: Profiler | Literal["simple", "advanced", "torch"] | None = None,
        reload_dataloaders_every_n_epochs: int = 0,
        use_distributed_sampler: bool = True,
        inference_mode: bool = True,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        enable_checkpointing: bool | None = None,
        default_root_dir: str | Path | None = None,
        barebones: bool = False,
        max_restarts: int = 0,
        elastic: bool | Literal["replace"] = False,
        preemption_deadline: float | None = None,
    ) -> None:
        self.arguments = changed_arguments(Trainer.__init__, locals())
        arguments = {
            "logger": logger,
            "progress_bar": enable_progress_bar,
            "model_summary": enable_model_summary,
            "checkpointing": enable_checkpointing,
            "log_every_n_steps": log_every_n_steps,
            "num_sanity_val_steps": num_sanity_val_steps,
            "profiler": profiler,
            "detect_anomaly": detect_anomaly,
        }
        # Before all other arguments, as the lines below calculate with fast_dev_run and max_steps.
        features = resolve_features(arguments, barebones=barebones, fast_dev_run=fast_dev_run)
        check_count(max_steps, "max_steps", -1)
        root = Path.cwd() if default_root_dir is None else default_root_dir
        self.settings = TrainerSettings(
            limits=RunLimits(
                max_epochs=max_epochs if max_epochs is not None else (DEFAULT_MAX_EPOCHS if max_steps < 0 else -1),
                max_steps=max_steps,
                min_epochs=min_epochs or 0,
                min_steps=min_steps or 0,
                max_time=max_time,
                fast_dev_run=int(fast_dev_run),
            ),
            data=DataLimits(
                limit_train_batches=limit_train_batches,
                limit_val_batches=limit_val_batches,
                limit_test_batches=limit_test_batches,
                limit_predict_batches=limit_predict_batches,
                overfit_batches=overfit_batches,
                reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
                use_distributed_sampler=use_distributed_sampler,
            ),
            evaluation=EvaluationSettings(
                check_val_every_n_epoch=check_val_every_n_epoch,
                val_check_interval=val_check_interval,
                num_sanity_val_steps=features.num_sanity_val_steps,
                inference_mode=inference_mode,
            ),
            steps=StepSettings(
                accumulate_grad_batches=accumulate_grad_batches,
                gradient_clip_val=gradient_clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm or "norm",
                deterministic=deterministic,
                benchmark=benchmark,
                sync_batchnorm=sync_batchnorm,
                detect_anomaly=detect_anomaly,
            ),
            output=OutputSettings(
                default_root_dir=as_path(root, "default_root_dir"),
                log_every_n_steps=features.log_every_n_steps,
                barebones=barebones,
            ),
        )
        check_arguments(self.settings)
        self.settings = self.settings.limited()

        self.request = Request(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            max_restarts=max_restarts,
            elastic=elastic,
            preemption_deadline=preemption_deadline,
        )
        check_ends_of_job(self.request)
        try:
            self.plan, self.strategy = resolve_request(self.request)  # imports the components
        except (KeyboardInterrupt, DstratError) as error:
            fold_frames(error)
            raise
        if self.is_global_zero:
            warn_of_variables(Trainer.__init__, self.arguments, os.environ)
        self.profiler = make_profiler(profiler)
        is_tried = self.fast_dev_run > 0
        self.loggers = complete_loggers(features.logger, self.default_root_dir, self.strategy, is_tried=is_tried)
        self.callbacks = complete_callbacks(
            callbacks,
            progress_bar=features.progress_bar,
            model_summary=features.model_summary,
            checkpointing=features.checkpointing,
            barebones=barebones,
            max_time=max_time,
        )
        is_timed = any(isinstance(callback, Timer) and callback.duration is not None for callback in self.callbacks)
        if is_timed and max_epochs is None and not fast_dev_run:
            self.max_epochs = -1  # the default must not end a training before its time
        saves_checkpoints = any(callback.saves_checkpoints for callback in self.callbacks)
        check_preemption(
            preemption_deadline,
            self.strategy.components.cluster_environment,
            saves_checkpoints=saves_checkpoints,
        )
        if elastic is not False:
            saves_in_memory = any(callback.saves_in_memory for callback in self.callbacks)
            check_elastic(elastic, saves_checkpoints=saves_checkpoints, saves_in_memory=saves_in_memory)

    @cached_property
    def run(self) -> Run:  # type: ignore[override]  # which mypy takes for a property that cannot be set
        """The run that was called last; before the first call one that has not begun."""
        return Run(self)

    # Methods for users

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning's argument: checkpoints never run code here
        *,
        resume: Literal["auto"] | None = None,
        **_unknown: Never,
    ) -> None:
        """Train a module.

        Args:
            model: The module.
            train_dataloaders: A DataLoader or another iterable; by default the data module's or the module's own.
            val_dataloaders: One or several; without one there is no validation.
            datamodule: Makes the loaders.
            ckpt_path: A checkpoint to resume from: its path, ``"last"`` or ``"best"``.
            weights_only: Accepted for compatibility with Lightning, without effect: checkpoints never run code.
            resume: ``"auto"`` resumes from the newest complete checkpoint in the folders of ModelCheckpoints, those of
                earlier runs with the same logger included, or else below ``default_root_dir`` unless ``dirpath`` or the
                logger's version chose the folders; without one training starts from scratch.

        Raises:
            CheckpointError: The checkpoint does not exist, is damaged, or is of another training.
            MisuseError: The module lacks a method, or this Trainer has finished its training.
            RankFailedError: A process of the job failed.
        """
        refuse_keywords(self.fit, _unknown, RETIRED_ARGUMENTS_OF_RUNS)
        from dstrat.training.callbacks.callback import Callback
        from dstrat.training.checkpoint.path import requested_checkpoint
        from dstrat.training.loops.sources import DataSources

        requested = requested_checkpoint(ckpt_path, resume)
        if self.fit_loop.finished and self.fit_loop.batches_seen:
            of_epochs = f" of {self.max_epochs}" if self.max_epochs >= 0 else ""  # -1 with max_steps alone
            raise MisuseError(
                f"this Trainer has finished its fit (epoch {self.fit_loop.epoch}{of_epochs}, "
                f"step {self.fit_loop.global_step}): make a new Trainer to train again"
            )
        sources = DataSources(model, datamodule, {"train": train_dataloaders, "val": val_dataloaders})
        sources.require("train", "training_step")
        sources.require_optimizers()
        if self.limit_val_batches != 0:
            sources.validates()  # before anything starts, as it finds misspelled names
        if requested is None:  # a resumed run has the learning rate and batch size that were found before
            for callback in self.callbacks:
                if overrides(callback, "on_before_fit", Callback):
                    callback.on_before_fit(self, sources.module, sources)
        self._launch("fit", sources, requested)

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
        **_unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data; return the logged values, a dict for each loader.

        Args:
            model: The module, with its weights as they are; by default that of the last run, with the weights of the
                best checkpoint of the last fit.
            dataloaders: One or several; by default the data module's or the module's own.
            ckpt_path: A checkpoint whose weights are loaded first: its path, ``"best"`` or ``"last"``.
            verbose: Whether the values are shown as a table on stderr, once for the job.
            datamodule: Makes the loaders.
            weights_only: Without effect, as for :meth:`fit`.
        """
        refuse_keywords(self.validate, _unknown, RETIRED_ARGUMENTS_OF_RUNS)
        results = self._evaluate("validate", model, datamodule, dataloaders, ckpt_path)
        return self._show("validate", results, verbose=verbose)

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
        **_unknown: Never,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data; return the logged values, a dict for each loader.

        Args:
            model: The module, with its weights as they are; by default that of the last run, with the weights of the
                best checkpoint of the last fit.
            dataloaders: One or several; by default the data module's or the module's own.
            ckpt_path: A checkpoint whose weights are loaded first: its path, ``"best"`` or ``"last"``.
            verbose: Whether the values are shown as a table on stderr, once for the job.
            datamodule: Makes the loaders.
            weights_only: Without effect, as for :meth:`fit`.
        """
        refuse_keywords(self.test, _unknown, RETIRED_ARGUMENTS_OF_RUNS)
        results = self._evaluate("test", model, datamodule, dataloaders, ckpt_path)
        return self._show("test", results, verbose=verbose)

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
        **_unknown: Never,
    ) -> list[Any]:
        """Run ``predict_step`` over the data; return its results in the order of the batches.

        With several loaders the result has a list for each.  If the predictions are too large for memory, pass
        ``return_predictions=False``, with which the list is empty, and a ``PredictionWriter``.  The weights are chosen
        as in :meth:`test`.
        """
        refuse_keywords(self.predict, _unknown, RETIRED_ARGUMENTS_OF_RUNS)
        predictions: list[Any] = self._evaluate(
            "predict", model, datamodule, dataloaders, ckpt_path, return_predictions=return_predictions is not False
        )
        return predictions

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint of the current run, or of the end of the last fit; every process must call it.

        After an evaluation that has loaded a checkpoint, the saved weights are that checkpoint's, which is logged.
        The state of the optimizers stays in host memory after a fit, 8 bytes per parameter for Adam in float32, and is
        freed with the Trainer.

        Args:
            path: Path or URL of the checkpoint.  A folder of another run that is there is moved beside it, which is
                logged; what this process has saved there, and a single file, is replaced.
            weights_only: Whether the checkpoint has the module's weights only.

        Raises:
            MisuseError: The state does not exist any more: another module has run since, the fit ran in processes that
                have ended, or the strategy has sharded the state and freed it.
            CheckpointError: It cannot be written; or the path is that of another checkpoint in a store, and it was
                written beside that.
        """
        from dstrat.training.checkpoint.save import save_checkpoint

        save_checkpoint(self.run, path, weights_only=weights_only)

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[None]:
        """Return a context in which modules are created in the run's precision and on its device.

        If the run happens in other processes, modules are created on the CPU, and sent to these.

        Args:
            empty_init: Whether parameters stay uninitialized, for a module whose weights are loaded later.
        """
        from dstrat.training.contexts import creating_modules

        return creating_modules(self.strategy, is_empty=empty_init)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once for the whole job."""
        launcher = self.strategy.launcher
        # A process that runs the script again would print a second time what comes before its launch.
        repeats = launcher is not None and launcher.repeats_the_script
        if self.is_global_zero and not repeats:
            print(*args, **kwargs)

    # Methods for strategies, loops and callbacks

    def configure_optimizers(self) -> Optimization:
        """Create the module's optimizers; called by the strategy after it has moved the module to its device."""
        module = self.run.module
        optimization = read_optimizers(module.configure_optimizers(), steps_schedulers=module.automatic_optimization)
        self.strategy.lr_schedulers = list(optimization.schedulers)  # which the hook may change
        self.run.hooks.call_callbacks("on_configure_optimizers", optimization.optimizers)
        return optimization

    # Launching

    def _evaluate(
        self,
        stage: Literal["validate", "test", "predict"],
        model: TrainModule | None,
        datamodule: DataModule | None,
        dataloaders: Any,
        ckpt_path: str | Path | None,
        **settings: Any,
    ) -> Any:
        from dstrat.training.checkpoint.path import Search
        from dstrat.training.loops.sources import PURPOSES, SOURCES, DataSources

        module = self.module if model is None else model
        if module is None:
            raise MisuseError(f"{stage} needs a module: pass one, or call fit on this Trainer first")
        source = SOURCES[stage]
        sources = DataSources(module, datamodule, {source: dataloaders})
        sources.require(source, f"{PURPOSES[source]}_step")
        requested = Search.BEST_OF_LAST_FIT if model is None and ckpt_path is None else ckpt_path
        return self._launch(stage, sources, requested, **settings)

    def _show(self, stage: str, values: list[dict[str, float]] | None, *, verbose: bool) -> list[dict[str, float]]:
        """Return the results of an evaluation, and show them once for the job."""
        from dstrat.training.evaluation_results import EvaluationResults

        results = EvaluationResults(stage, values or ())  # None on a machine without global rank 0
        if verbose and self.is_global_zero and not self.barebones and results:
            results.show()
        return results

    def _launch(self, stage: Stage, sources: DataSources, ckpt_path: CheckpointRequest, **settings: Any) -> Any:
        if self.is_running:
            raise MisuseError(
                f"this Trainer is in the middle of its {self.stage}, and {stage} was called: call it after the end, or "
                "on another Trainer"
            )
        from dstrat.training.execution import launch

        self.run = Run(self, stage, sources, previous=self.run, **settings)
        try:
            result = launch(self.run, ckpt_path)
        except BaseException as error:  # KeyboardInterrupt too
            self.run.status = TrainerStatus.INTERRUPTED
            fold_frames(error)
            raise
        self.run.status = TrainerStatus.FINISHED
        return result
