"""The Trainer: takes what the user asks for, makes a plan, and runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import MisuseError
from dstrat.interfaces.optimization import Optimization, read_optimizers
from dstrat.resolve import Request, build, make_plan
from dstrat.training.arguments import check_arguments
from dstrat.training.callbacks.defaults import complete_callbacks
from dstrat.training.checkpoint import collect_checkpoint
from dstrat.training.data.loaders import limit_of
from dstrat.training.data.sources import Sources
from dstrat.training.dispatch import Dispatch
from dstrat.training.loggers.defaults import complete_loggers
from dstrat.training.loops.fit_loop import FitLoop
from dstrat.training.metrics.latest import Metrics, as_numbers
from dstrat.training.random_state import RandomState
from dstrat.training.run import execute, execute_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.interfaces.strategy import Strategy
    from dstrat.resolve import Plan
    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.loggers.logger import Logger
    from dstrat.training.metrics.logged import LoggedValues
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule

Stage = Literal["fit", "validate", "test", "predict"]

DEFAULT_MAX_EPOCHS = 1000


class Trainer:
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
        limit_train_batches: Batches of an epoch to train on: a number, or a fraction as a float.
        limit_val_batches: The same of each validation loader.
        limit_test_batches: The same of each test loader.
        limit_predict_batches: The same of each prediction loader.
        check_val_every_n_epoch: Validate in every n-th epoch.
        val_check_interval: Validate in such an epoch after every so many batches, or fraction of the epoch as a float;
            by default after its last batch.
        num_sanity_val_steps: Validation batches to try before training starts.
        log_every_n_steps: Optimizer steps between two writes of step values to the loggers.
        accumulate_grad_batches: Batches whose gradients make up one optimizer step.
        gradient_clip_val: Largest norm or value of gradients; None does not clip.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        use_distributed_sampler: Whether loaders are divided between processes.
        inference_mode: Whether evaluation runs under ``torch.inference_mode`` rather than ``no_grad``.
        enable_progress_bar: Whether progress is shown.
        enable_model_summary: Whether the layers are listed before training.
        enable_checkpointing: Whether a checkpoint of the last epoch is kept when no ModelCheckpoint is given.
        default_root_dir: Where logs and checkpoints go; the working directory by default.

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
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        limit_test_batches: float | None = None,
        limit_predict_batches: float | None = None,
        check_val_every_n_epoch: int = 1,
        val_check_interval: float | None = None,
        num_sanity_val_steps: int = 2,
        log_every_n_steps: int = 50,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: ClipAlgorithm = "norm",
        use_distributed_sampler: bool = True,
        inference_mode: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        enable_checkpointing: bool = True,
        default_root_dir: str | Path | None = None,
    ) -> None:
        self.max_epochs = max_epochs if max_epochs is not None else (DEFAULT_MAX_EPOCHS if max_steps < 0 else -1)
        self.max_steps = max_steps
        self.limit_train_batches = limit_train_batches
        self.limit_val_batches = limit_val_batches
        self.limit_test_batches = limit_test_batches
        self.limit_predict_batches = limit_predict_batches
        self.check_val_every_n_epoch = check_val_every_n_epoch
        self.val_check_interval = val_check_interval
        self.num_sanity_val_steps = num_sanity_val_steps
        self.log_every_n_steps = log_every_n_steps
        self.accumulate_grad_batches = accumulate_grad_batches
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.use_distributed_sampler = use_distributed_sampler
        self.inference_mode = inference_mode
        self.default_root_dir = Path(default_root_dir or Path.cwd())
        check_arguments(self)

        request = Request(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=() if plugins is None else tuple(plugins) if isinstance(plugins, list | tuple) else (plugins,),
        )
        self.plan: Plan = make_plan(request)
        self.strategy: Strategy = build(self.plan, request)
        self.loggers = complete_loggers(logger, self.default_root_dir)
        self.callbacks = complete_callbacks(
            callbacks,
            progress_bar=enable_progress_bar,
            model_summary=enable_model_summary,
            checkpointing=enable_checkpointing,
        )

        self.stage: Stage = "fit"
        self.should_stop = False
        self.sanity_checking = False
        self.fit_loop = FitLoop(self)
        self.metrics = Metrics()
        self.module: TrainModule | None = None
        self.datamodule: DataModule | None = None
        self.log_dir: Path | None = None
        self.logged: LoggedValues = self.fit_loop.logged
        self.evaluation_batches: list[int | None] = []
        self.dispatch: Dispatch
        self._running = False

    # What users call

    def fit(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train a module.

        Args:
            model: The module.
            train_dataloaders: A DataLoader or another iterable; by default the data module's or the module's own.
            val_dataloaders: One or several; without one there is no validation.
            datamodule: Gives the loaders.
            ckpt_path: A checkpoint from which to go on.

        Raises:
            MisuseError: The module lacks something, or the training is finished already.
            RankFailedError: A process of the job failed.
        """
        if self.fit_loop.finished and self.fit_loop.batches_seen:
            raise MisuseError(
                f"this Trainer has finished its fit (epoch {self.fit_loop.epoch} of {self.max_epochs}, "
                f"step {self.fit_loop.global_step}): make a new Trainer to train again"
            )
        sources = Sources(model, datamodule, {"train": train_dataloaders, "val": val_dataloaders})
        sources.require("train", "training_step")
        sources.require_optimizers()
        self.fit_loop = FitLoop(self)
        self._launch("fit", model, sources, ckpt_path)

    def validate(
        self,
        model: TrainModule,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``validation_step`` over the validation data; return the logged values, a dict for each loader."""
        sources = Sources(model, datamodule, {"val": dataloaders})
        sources.require("val", "validation_step")
        results: list[dict[str, float]] = self._launch("validate", model, sources, ckpt_path)
        return results

    def test(
        self,
        model: TrainModule,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        datamodule: DataModule | None = None,
    ) -> list[dict[str, float]]:
        """Run ``test_step`` over the test data; return the logged values, a dict for each loader."""
        sources = Sources(model, datamodule, {"test": dataloaders})
        sources.require("test", "test_step")
        results: list[dict[str, float]] = self._launch("test", model, sources, ckpt_path)
        return results

    def predict(
        self,
        model: TrainModule,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = None,
        datamodule: DataModule | None = None,
    ) -> list[Any]:
        """Run ``predict_step`` over the data; return its results in the order of the batches.

        With several loaders there is a list for each.
        """
        sources = Sources(model, datamodule, {"predict": dataloaders})
        sources.require("predict", "predict_step")
        predictions: list[Any] = self._launch("predict", model, sources, ckpt_path)
        return predictions

    def save_checkpoint(self, path: str | Path, weights_only: bool = False) -> None:
        """Write a checkpoint; every process of the job calls it.

        Args:
            path: The file to write.
            weights_only: Whether everything but the module's weights is left out.
        """
        if not self._running:
            raise MisuseError("save_checkpoint works during a run: call it from a hook of the module or of a callback")
        self.strategy.save_checkpoint(collect_checkpoint(self, weights_only=weights_only), path)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once for the whole job."""
        launcher = self.strategy.launcher
        repeats = launcher is not None and launcher.repeats_the_script
        if self.is_global_zero and not repeats:
            print(*args, **kwargs)

    # Where this process is

    @property
    def world_size(self) -> int:
        """Number of processes of the job."""
        return self.strategy.world_size

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
        """Whether the run's results have to be brought to the process that asked for it."""
        return self.strategy.launcher is not None and not self.strategy.launcher.runs_here

    # Where the run is

    @property
    def is_fitting(self) -> bool:
        """Whether the module is being trained, also while it is validated in between."""
        return self.stage == "fit"

    @property
    def current_epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self.fit_loop.epoch

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken."""
        return self.fit_loop.global_step

    @property
    def num_training_batches(self) -> int | None:
        """Number of training batches in an epoch; None where it is unknown."""
        return self.fit_loop.num_batches

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of the run."""
        return self.strategy.optimizers

    @property
    def model(self) -> Any:
        """The module as the strategy wrapped it."""
        return self.strategy.model

    @property
    def logger(self) -> Logger | None:
        """The first logger, None without one."""
        return self.loggers[0] if self.loggers else None

    @property
    def callback_metrics(self) -> dict[str, Tensor | float]:
        """Latest value of everything that was logged, by name."""
        return self.metrics.all(self.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """What the progress bar shows, by name; reads the values from the device."""
        return self.metrics.shown(self.logged)

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that saves checkpoints."""
        return next((callback for callback in self.callbacks if callback.runs_last), None)

    def configure_optimizers(self) -> Optimization:
        """Create the module's optimizers; called by the strategy when the module is on its device."""
        assert self.module is not None  # noqa: S101 - there is one in every run
        return read_optimizers(self.module.configure_optimizers())

    # What the loops call

    def begin(self, module: TrainModule, sources: Sources) -> None:
        """Attach the module in the process that runs it."""
        self.module, self.datamodule = module, sources.datamodule
        module.attach(self)
        if self.datamodule is not None:
            self.datamodule.attach(self)
        self.dispatch = Dispatch(self, module, self.callbacks)
        self.should_stop = False
        self.metrics = Metrics()
        self._running = True

    def end(self) -> None:
        """Detach the module again."""
        for attached in (self.module, self.datamodule):
            if attached is not None:
                attached.attach(None)
        self._running = False

    def agree_on_log_dir(self) -> None:
        """Let rank 0 choose the folder of this run, and tell the others."""
        chosen = next((logger.log_dir for logger in self.writing_loggers if logger.log_dir), None)
        self.log_dir = self.strategy.broadcast(chosen)

    @property
    def writing_loggers(self) -> list[Logger]:
        """The loggers, in the process that writes; none in the others."""
        return self.loggers if self.is_global_zero else []

    def publish_step(self, logged: LoggedValues) -> None:
        """Write the step's values to the loggers; collective where one of them is synchronised."""
        self._write(self.metrics.of_step(logged, self.strategy))

    def publish_epoch(self, logged: LoggedValues, hooks: Iterable[Callable[[], Any]]) -> None:
        """Reduce the values over the epoch, call the hooks at its end, and write all to the loggers; collective.

        The hooks see the values, and may log more.
        """
        self.metrics.start_epoch()
        values = self.metrics.of_epoch(logged, self.strategy)
        for hook in hooks:
            hook()
        values |= self.metrics.of_epoch(logged, self.strategy)
        if not self.sanity_checking:
            self._write(values)

    def _write(self, values: dict[str, float]) -> None:
        if values:
            for logger in self.writing_loggers:
                logger.log_metrics({"epoch": self.current_epoch, **values}, self.global_step)

    def evaluation_results(self, num_loaders: int) -> list[dict[str, float]]:
        """Return the values that an evaluation logged, as numbers, a dict for each loader."""
        values = as_numbers(self.metrics.latest_epoch)
        if num_loaders == 1:
            return [values]
        suffixes = [f"/dataloader_idx_{index}" for index in range(num_loaders)]
        shared = {name: value for name, value in values.items() if "/dataloader_idx_" not in name}
        return [shared | {n: v for n, v in values.items() if n.endswith(suffix)} for suffix in suffixes]

    def evaluation_limit(self, purpose: Literal["validation", "test", "predict"]) -> tuple[float | None, str]:
        """Return the limit of an evaluation's batches, and the argument's name."""
        name = {
            "validation": "limit_val_batches",
            "test": "limit_test_batches",
            "predict": "limit_predict_batches",
        }[purpose]
        return getattr(self, name), name

    def validation_interval(self, num_batches: int | None) -> int | None:
        """Return after how many training batches validation runs; None after the last of an epoch."""
        interval = self.val_check_interval
        if interval is None or (interval == 1.0 and isinstance(interval, float)):
            return None
        if num_batches is not None and interval > num_batches:
            raise MisuseError(
                f"val_check_interval={interval!r} is more than the {num_batches} training batches of an epoch: "
                "validation would never run"
            )
        return max(1, limit_of(interval, num_batches, "val_check_interval") or 1)

    # Launching

    def _launch(self, stage: Stage, module: TrainModule, sources: Sources, ckpt_path: str | Path | None) -> Any:
        self.stage = stage
        self.strategy.connect(module)
        launcher = self.strategy.launcher
        if launcher is None:
            return execute(self, module, sources, ckpt_path).result
        if launcher.runs_here:
            return launcher.launch(execute, self, module, sources, ckpt_path).result
        if self.node_rank == 0 and not launcher.reruns_the_script:
            # Here rather than in rank 0, so that this process knows the folder afterwards.
            folders = [logger.log_dir for logger in self.loggers]
            self.log_dir = next(filter(None, folders), None)
        outcome = launcher.launch(execute_elsewhere, RandomState.capture(), self, module, sources, ckpt_path)
        outcome.restore(self, module)
        return outcome.result
