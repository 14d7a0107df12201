"""The Trainer: takes what the user asks for, makes a plan, and runs it; what only a run needs is loaded by the run."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dstrat.checkpoint.paths import on_this_machine, place
from dstrat.data.random_state import RandomState
from dstrat.errors import MisuseError
from dstrat.interfaces.optimizers import Optimization, read_optimizers
from dstrat.resolve import Request, resolve_request
from dstrat.training.arguments import check_arguments, check_count, check_fast_dev_run, resolve_features
from dstrat.training.callbacks.defaults import complete_callbacks
from dstrat.training.hooks import overrides
from dstrat.training.loggers.defaults import complete_loggers
from dstrat.training.loops.stopping import Interruption, end_by, is_by_signal
from dstrat.training.metrics.publisher import Metrics, Publisher
from dstrat.training.profilers.defaults import make_profiler
from dstrat.training.run_context import RunContext
from dstrat.training.state import RunState, TrainerStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.callbacks.timer import Duration
    from dstrat.training.checkpoint.path import CheckpointRequest
    from dstrat.training.loggers.logger import Logger
    from dstrat.training.loops.fit_loop import FitLoop
    from dstrat.training.loops.sources import DataSources, Source
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.profilers.profiler import Profiler
    from dstrat.training.results import FinalState, RunResult
    from dstrat.training.run_context import Stage

R = TypeVar("R")
B = TypeVar("B")

DEFAULT_MAX_EPOCHS = 1000

_NEEDED: dict[str, tuple[Source, str]] = {
    "validate": ("val", "validation_step"),
    "test": ("test", "test_step"),
    "predict": ("predict", "predict_step"),
}


class Trainer(RunState):
    """Runs a module over its data, by the strategy and on the devices that the user chose.

    What will run is decided when the Trainer is made: ``print(trainer.plan)`` shows each choice with its reason, and
    whatever cannot work is an error before anything starts.

    Args:
        accelerator: Hardware by alias (``"cpu"``, ``"gpu"``, ``"auto"`` ...) or as an Accelerator.
        strategy: How training is distributed: by alias (``"ddp"``, ``"auto"`` ...) or as a Strategy.
        devices: How many devices of each machine, or which: ``4``, ``"4"``, ``[0, 1]``, ``"0,1"``, ``-1``, ``"auto"``.
        num_nodes: Number of machines.
        precision: ``"32-true"``, ``"64-true"``, ``"16-true"``, ``"bf16-true"``, ``"16-mixed"``, ``"bf16-mixed"``, also
            ``16``, ``32``, ``64`` and ``"bf16"``.
        plugins: Parts of one's own: a Precision, a ClusterEnvironment, a CheckpointIO; one of each kind.
        logger: One or several loggers; True takes a CSV logger, False none.
        callbacks: One or several callbacks.
        max_epochs: Stop after so many epochs; -1 never.  1000 when ``max_steps`` is not given either.
        max_steps: Stop after so many optimizer steps; -1 never.
        min_epochs: Do so many epochs before ``should_stop`` counts.
        min_steps: Do so many optimizer steps before ``should_stop`` counts.
        max_time: Stop after this time: ``"DD:HH:MM:SS"``, a timedelta, or a dict such as ``{"hours": 8}``.
        limit_train_batches: Batches of an epoch to train on: a number, or a fraction as a float.
        limit_val_batches: The same of each validation loader.
        limit_test_batches: The same of each test loader.
        limit_predict_batches: The same of each prediction loader.
        overfit_batches: Train on so many batches, or this fraction, of the unshuffled data in every epoch, and validate
            on as many; 0 does not.
        fast_dev_run: Try so many batches (True is 1) of everything.  Loggers are silent ones then, and
            callbacks that save checkpoints are not called.
        check_val_every_n_epoch: Validate in every n-th epoch; None counts ``val_check_interval`` across epochs.
        val_check_interval: Validate in such an epoch after every so many batches, or fraction of the epoch as a float,
            or time (written as ``max_time`` is) whatever the epoch; by default after its last batch.
        num_sanity_val_steps: Validation batches to try before training starts; -1 tries all.
        log_every_n_steps: Optimizer steps between two writes of step values to the loggers; 0 writes none.
        accumulate_grad_batches: Batches whose gradients make up one optimizer step.
        gradient_clip_val: Largest norm or value of gradients; None and 0 do not clip.
        gradient_clip_algorithm: ``"norm"``, the default, or ``"value"``.
        deterministic: Whether operations without a deterministic implementation are errors; ``"warn"`` only warns.
        benchmark: Whether cuDNN tries its algorithms and takes the fastest; None leaves torch's setting.
        sync_batchnorm: Whether batch-norm layers share their statistics over all processes.
        detect_anomaly: Whether the first value that is NaN is an error that names its module; slow.
        profiler: ``"simple"`` for a table of times, ``"advanced"`` for one of every function, ``"torch"`` for a trace,
            or a Profiler.
        reload_dataloaders_every_n_epochs: Ask the module or data module for new loaders after so many epochs; 0 never.
        use_distributed_sampler: Whether loaders are divided between processes.
        inference_mode: Whether validate, test and predict run under ``torch.inference_mode`` rather than ``no_grad``;
            validation within a fit has ``no_grad``.
        enable_progress_bar: Whether progress is shown.
        enable_model_summary: Whether the layers are listed before training.
        enable_checkpointing: Whether a checkpoint of the last epoch is kept when no ModelCheckpoint is given; False is
            in conflict with one, and the other two with theirs.
        default_root_dir: Where logs and checkpoints go; the working directory by default.  Where it is a URL of a store
            that fsspec reaches, such as ``"s3://bucket/run"``, checkpoints go there, and logs to the working directory.
        barebones: Whether everything that costs time beside training is off: bar, summary, logger, checkpoints, sanity
            check, and logging; asking for one of them, a profiler, ``detect_anomaly`` or ``fast_dev_run`` is an error.

    Raises:
        DstratError: The request cannot be done as asked; the message says what is possible.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        logger: Logger | Sequence[Logger] | bool | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        max_epochs: int | None = None,
        max_steps: int = -1,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        max_time: Duration | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        overfit_batches: float = 0,
        fast_dev_run: int | bool = False,
        check_val_every_n_epoch: int | None = 1,
        val_check_interval: float | Duration | None = None,
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
    ) -> None:
        check_fast_dev_run(fast_dev_run)
        check_count(max_steps, "max_steps", -1)
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
        features = resolve_features(arguments, barebones=barebones, fast_dev_run=fast_dev_run)
        self.fast_dev_run = int(fast_dev_run)
        self.barebones = barebones

        self.max_epochs = max_epochs if max_epochs is not None else (DEFAULT_MAX_EPOCHS if max_steps < 0 else -1)
        self.max_steps = max_steps
        self.min_epochs, self.min_steps = min_epochs or 0, min_steps or 0
        self.max_time = max_time
        self.limit_train_batches, self.limit_val_batches = limit_train_batches, limit_val_batches
        self.limit_test_batches, self.limit_predict_batches = limit_test_batches, limit_predict_batches
        self.overfit_batches = overfit_batches
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.val_check_interval = val_check_interval
        self.num_sanity_val_steps = features.num_sanity_val_steps
        self.log_every_n_steps = features.log_every_n_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val, gradient_clip_algorithm or "norm"
        self.deterministic, self.benchmark = deterministic, benchmark
        self.sync_batchnorm, self.detect_anomaly = sync_batchnorm, detect_anomaly
        self.reload_dataloaders_every_n_epochs = reload_dataloaders_every_n_epochs
        self.use_distributed_sampler = use_distributed_sampler
        self.inference_mode = inference_mode
        self.default_root_dir = place(Path.cwd() if default_root_dir is None else default_root_dir, "default_root_dir")
        check_arguments(self)
        self.gradient_clip_val = gradient_clip_val or None
        self._apply_fast_dev_run()

        self.request = Request(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=() if plugins is None else tuple(plugins) if isinstance(plugins, list | tuple) else (plugins,),
        )
        self.plan, self.strategy = resolve_request(self.request)
        self.profiler = make_profiler(profiler)
        self.loggers = complete_loggers(
            features.logger,
            on_this_machine(self.default_root_dir),
            writes=self.strategy.is_global_zero,
            is_tried=self.fast_dev_run > 0,
        )
        self.callbacks = complete_callbacks(
            callbacks,
            progress_bar=features.progress_bar,
            model_summary=features.model_summary,
            checkpointing=features.checkpointing,
            barebones=barebones,
            max_time=max_time,
        )

        self.should_stop = False
        self.interruption = Interruption()
        self.publisher = Publisher(self)
        self.context = RunContext(metrics=Metrics(self.strategy))
        self.final_state: FinalState | None = None

    def _apply_fast_dev_run(self) -> None:
        """Let ``fast_dev_run`` and ``overfit_batches`` decide how much is read."""
        if self.fast_dev_run:
            batches: float | None = self.fast_dev_run
            self.limit_test_batches = self.limit_predict_batches = batches
            self.max_epochs, self.max_steps, self.min_epochs, self.min_steps = 1, -1, 0, 0
            self.check_val_every_n_epoch, self.val_check_interval = 1, None
        else:
            batches = self.overfit_batches or None
        if batches:
            self.limit_train_batches = self.limit_val_batches = batches

    @cached_property
    def fit_loop(self) -> FitLoop:  # type: ignore[override]  # a cached property can be written
        """Trains."""
        from dstrat.training.loops.fit_loop import FitLoop

        return FitLoop(self)

    # What users call

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - Lightning's: no checkpoint runs code here, whatever it says
        *,
        resume: Literal["auto"] | None = None,
    ) -> None:
        """Train a module.

        Args:
            model: The module.
            train_dataloaders: A DataLoader or another iterable; by default the data module's or the module's own.
            val_dataloaders: One or several; without one there is no validation.
            datamodule: Gives the loaders.
            ckpt_path: A checkpoint from which to go on: its path, ``"last"`` or ``"best"``.
            weights_only: Taken as Lightning takes it, and without effect: no checkpoint runs code.
            resume: ``"auto"`` goes on from the newest complete checkpoint in the folder of a ModelCheckpoint, or else
                below ``default_root_dir``; where there is none, training starts anew.

        Raises:
            CheckpointError: The checkpoint is not there, damaged, or of another training.
            MisuseError: The module lacks something, or the training is finished already.
            RankFailedError: A process of the job failed.
        """
        from dstrat.training.checkpoint.path import requested_checkpoint
        from dstrat.training.loops.sources import DataSources

        requested = requested_checkpoint(ckpt_path, resume)
        if self.fit_loop.finished and self.fit_loop.batches_seen:
            raise MisuseError(
                f"this Trainer has finished its fit (epoch {self.fit_loop.epoch} of {self.max_epochs}, "
                f"step {self.fit_loop.global_step}): make a new Trainer to train again"
            )
        sources = DataSources(model, datamodule, {"train": train_dataloaders, "val": val_dataloaders})
        sources.require("train", "training_step")
        sources.require_optimizers()
        if requested is None:  # otherwise the run goes on with what was tuned before
            self._prepare_fit(model, sources)
        del self.fit_loop  # each fit has its own
        self._launch("fit", model, sources, requested)

    def validate(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data; return the logged values, a dict for each loader.

        Args:
            model: The module, with its weights as they are; by default that of the last run, with the weights of the
                best checkpoint of the last fit.
            dataloaders: One or several; by default the data module's or the module's own.
            ckpt_path: A checkpoint whose weights are loaded first: its path, ``"best"`` or ``"last"``.
            verbose: Whether the values are shown as a table on stderr, once for the job.
            datamodule: Gives the loaders.
            weights_only: Without effect, as for :meth:`fit`.
        """
        results = self._evaluate("validate", model, datamodule, dataloaders, ckpt_path)
        return self._shown("validate", results) if verbose else results

    def test(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data; return the logged values, a dict for each loader.

        Args:
            model: The module, with its weights as they are; by default that of the last run, with the weights of the
                best checkpoint of the last fit.
            dataloaders: One or several; by default the data module's or the module's own.
            ckpt_path: A checkpoint whose weights are loaded first: its path, ``"best"`` or ``"last"``.
            verbose: Whether the values are shown as a table on stderr, once for the job.
            datamodule: Gives the loaders.
            weights_only: Without effect, as for :meth:`fit`.
        """
        results = self._evaluate("test", model, datamodule, dataloaders, ckpt_path)
        return self._shown("test", results) if verbose else results

    def predict(
        self,
        model: TrainModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,  # noqa: ARG002 - as for fit
    ) -> list[Any]:
        """Run ``predict_step`` over the data; return its results in the order of the batches.

        With several loaders there is a list for each.  Where they would be too large, pass
        ``return_predictions=False`` and a ``PredictionWriter``; the list is empty then.  Which weights are used is as
        in :meth:`test`.
        """
        predictions: list[Any] = self._evaluate(
            "predict", model, datamodule, dataloaders, ckpt_path, return_predictions=return_predictions
        )
        return predictions

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint, in a run or of the end of the last fit; every process calls it.

        After an evaluation that has loaded a checkpoint, the module's weights are those, and a line in the log says so.
        For this, the state of the optimizers stays in the memory of the host after a fit: of Adam in float32, 8 bytes
        per parameter.  It is freed with the Trainer.

        Args:
            path: The file to write.
            weights_only: Whether everything but the module's weights is left out.

        Raises:
            MisuseError: There is nothing to save from any more: another module was run since, the fit ran in processes
                that have ended, or its strategy has shared out the state and given it up.
        """
        from dstrat.training.checkpoint.save import collect_checkpoint
        from dstrat.training.contexts import warn_if_slow
        from dstrat.training.results import nothing_to_save_error

        path = os.path.expanduser(path)  # noqa: PTH111 - it may be a URL; a CheckpointIO of the user's own may not do it
        if self.is_running:
            with warn_if_slow(self, "save_checkpoint"):
                self.strategy.barrier("save_checkpoint")
            self.strategy.save_checkpoint(collect_checkpoint(self, weights_only=weights_only), path)
        elif self.final_state is not None:
            self.final_state.save(self, path, weights_only=weights_only)
        else:
            raise nothing_to_save_error(self)

    def init_module(self, empty_init: bool = False) -> AbstractContextManager[None]:
        """Return a context in which a module is created at once in the run's precision, and on its device.

        Where the run happens in other processes it is created on the CPU, from which they take it.

        Args:
            empty_init: Whether parameters are left as the memory was, for a module whose weights are loaded anyway.
        """
        from dstrat.training.contexts import creating_modules

        return creating_modules(self.strategy, is_empty=empty_init)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once for the whole job."""
        launcher = self.strategy.launcher
        repeats = launcher is not None and launcher.repeats_the_script
        if self.is_global_zero and not repeats:
            print(*args, **kwargs)

    # What strategies, loops and callbacks call

    def configure_optimizers(self) -> Optimization:
        """Create the module's optimizers; called by the strategy when the module is on its device."""
        assert self.module is not None  # noqa: S101 - there is one in every run
        returned = self.module.configure_optimizers()
        optimization = read_optimizers(returned, steps_schedulers=self.module.automatic_optimization)
        self.context.hooks.call_callbacks("on_configure_optimizers", optimization.optimizers)
        return optimization

    def profiled(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        """Return the function, measured where a profiler was asked for."""
        return function if self.profiler is None else self.profiler.timed(name, function)

    def profiled_batches(self, batches: Iterable[B]) -> Iterable[B]:
        """Return the batches; the wait for each is measured where a profiler was asked for."""
        return batches if self.profiler is None else _each(self.profiled("next_batch", iter(batches).__next__))

    @property
    def writing_loggers(self) -> list[Logger]:
        """The loggers, in the process that writes; none in the others."""
        return self.loggers if self.is_global_zero else []

    # Launching

    def _prepare_fit(self, module: TrainModule, sources: DataSources) -> None:
        from dstrat.training.callbacks.callback import Callback

        for callback in self.callbacks:
            if overrides(callback, "on_before_fit", Callback):
                callback.on_before_fit(self, module, sources)

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
        from dstrat.training.loops.sources import DataSources

        module = self.module if model is None else model
        if module is None:
            raise MisuseError(f"{stage} needs a module: pass one, or call fit on this Trainer first")
        source, step = _NEEDED[stage]
        sources = DataSources(module, datamodule, {source: dataloaders})
        sources.require(source, step)
        requested = Search.BEST_OF_LAST_FIT if model is None and ckpt_path is None else ckpt_path
        return self._launch(stage, module, sources, requested, **settings)

    def _shown(self, stage: str, results: list[dict[str, float]]) -> list[dict[str, float]]:
        """Show what an evaluation came to, and return it."""
        from dstrat.training.results import show_results

        if self.is_global_zero and not self.barebones and results:  # there are none on a machine without rank 0
            show_results(stage, results)
        return results

    def _launch(
        self, stage: Stage, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest, **settings: Any
    ) -> Any:
        if self.is_running:
            raise MisuseError(
                f"this Trainer is in the middle of its {self.stage}, and {stage} was called: call it after the end, or "
                "on another Trainer"
            )
        if stage == "fit" or module is not self.module:
            self.final_state = None
        self.should_stop = False
        self.context = RunContext(
            stage=stage,
            module=module,
            datamodule=sources.datamodule,
            sources=sources,
            metrics=Metrics(self.strategy),
            log_dir=self.context.log_dir,
            **settings,
        )
        if stage == "fit":
            self.final_optimization, self.optimization_ended_elsewhere = Optimization(), False
        self.status = TrainerStatus.RUNNING
        try:
            result = self._launch_stage(module, sources, ckpt_path)
        except BaseException:
            self.status = TrainerStatus.INTERRUPTED
            raise
        self.status = TrainerStatus.FINISHED
        return result

    def _launch_stage(self, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> Any:
        from dstrat.training.run import execute, execute_elsewhere

        self.strategy.connect(module)
        launcher = self.strategy.launcher
        if launcher is None:
            return execute(self, module, sources, ckpt_path).result
        if launcher.runs_here:
            return launcher.launch(execute, self, module, sources, ckpt_path).result
        if self.node_rank == 0 and not launcher.reruns_the_script:
            # Here rather than in rank 0, so that this process knows the folder afterwards.
            folders = [logger.log_dir for logger in self.loggers]
            self.context.log_dir = next(filter(None, folders), None)
        try:
            outcome: RunResult | None = launcher.launch(
                execute_elsewhere, RandomState.capture(), self, module, sources, ckpt_path
            )
        except (KeyboardInterrupt, SystemExit) as error:  # at once, so that there is no outcome
            self.context.interrupted = is_by_signal(error)
            raise
        if outcome is None:  # on machines without global rank 0
            return None
        self.optimization_ended_elsewhere |= self.is_fitting
        module.attach(self)
        outcome.restore(self, module)
        if outcome.stopped_by:
            self.context.interrupted, self.interruption.requested = True, outcome.stopped_by
            end_by(outcome.stopped_by)
        return outcome.result


def _each(following: Callable[[], B]) -> Iterator[B]:
    """Yield what a function returns until it raises StopIteration."""
    while True:
        try:
            item = following()
        except StopIteration:
            return
        yield item
