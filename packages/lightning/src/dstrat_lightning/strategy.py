"""dstrat's strategies as strategies of Lightning's Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only
from torch import distributed as dist
from typing_extensions import override

from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.optimizers import Optimization
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve import Request, resolve_request
from dstrat_lightning.internals import make_launcher, make_optimizers, synchronizes_batchnorm, unwrap_optimizer
from dstrat_lightning.module import reset_seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat import Strategy
    from dstrat.interfaces.precision import ClipAlgorithm


class LightningProcesses(ExternalEnvironment):
    """The processes that a Lightning Trainer has started.

    Args:
        strategy: Of Lightning, with rank and world size.
    """

    names = RankNames(world_size="WORLD_SIZE", global_rank="RANK", local_rank="LOCAL_RANK")
    hint = "start the program as Lightning's documentation describes"

    def __init__(self, strategy: Any) -> None:
        cluster = strategy.cluster_environment
        super().__init__(
            {
                "MASTER_ADDR": str(cluster.main_address),
                "MASTER_PORT": str(cluster.main_port),
                "WORLD_SIZE": str(strategy.world_size),
                "RANK": str(strategy.global_rank),
                "LOCAL_RANK": str(strategy.local_rank),
            }
        )
        self._node_rank: int = strategy.node_rank

    @classmethod
    @override
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return None

    @property
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        return "python program.py"


class FitSettings:
    """Settings of a fit, as ``setup`` of a strategy of dstrat reads them.

    Args:
        trainer: Lightning's.
        make_optimizers: Returns the optimizers.

    Attributes:
        is_fitting: Whether the module is trained.
        accumulate_grad_batches: Batches of one optimizer step.
        gradient_clip_val: Always None, as Lightning clips.
        gradient_clip_algorithm: Of clipping.
    """

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: ClipAlgorithm = "norm"

    def __init__(self, trainer: Any, make_optimizers: Any) -> None:
        self.is_fitting = trainer.state.fn == "fit"
        self.accumulate_grad_batches: int = trainer.accumulate_grad_batches
        self.configure_optimizers = make_optimizers


@cache
def strategy_class(package: str) -> type[Any]:  # noqa: C901 - it makes one class, whose methods are counted
    """Return the class for one of Lightning's packages.

    Args:
        package: ``"lightning.pytorch"`` or ``"pytorch_lightning"``.
    """
    library: Any = import_module(f"{package}.strategies")
    base: Any = library.ParallelStrategy

    class DstratStrategy(base):  # type: ignore[misc]  # found at run time
        """Strategy of Lightning's that runs one of dstrat in the processes of Lightning's Trainer.

        Lightning starts the processes, casts, clips, loops and writes its files; dstrat's strategy opens communication,
        wraps or shards the module, synchronizes gradients, and gathers and loads states.

        Args:
            alias: Of the strategy, such as ``"fsdp"``.
            start_method: Of the processes, which Lightning starts; None is that of the alias, such as ``ddp_fork``.
        """

        is_distributed = True
        """Whether Lightning divides the data among the ranks, which it otherwise does for its own classes alone."""

        def __new__(cls, alias: str, start_method: str | None = None) -> Any:  # noqa: ARG004 - of __init__
            if not isinstance(alias, str):
                raise MisuseError(
                    f"the strategy is {alias!r}: pass an alias, whose options follow it, as in 'mesh(cp=2)', "
                    "as each process makes the strategy itself"
                )
            # Only dstrat's ddp counts as Lightning's: libraries then expect whole parameters and a wrapped module.
            target = str(get_catalog().find("strategy", alias).component.target)
            is_ddp = target.endswith(f":{library.DDPStrategy.__name__}")
            return super().__new__(DstratDDPStrategy if is_ddp else cls)

        def __init__(self, alias: str, start_method: str | None = None) -> None:
            super().__init__()
            of_alias = get_catalog().find("strategy", alias).component.options.get("start_method")
            self._start_method: str = start_method or of_alias or "popen"
            self.alias = alias
            self.num_nodes = 1  # the Trainer sets it
            self._evaluation = ExitStack()
            self._has_failed = False
            self._inner: Strategy | None = None

        def __reduce__(self) -> tuple[Any, ...]:  # for spawn: a class of a function cannot be found by its name
            return _blank_strategy, (package, self.alias), self.__getstate__()

        @property
        def inner(self) -> Strategy:
            """The strategy of dstrat, from the setup of the processes on."""
            if self._inner is None:
                raise MisuseError(f"strategy 'dstrat_{self.alias}' is not set up yet: ask for it in a run")
            return self._inner

        @property
        def restore_checkpoint_after_setup(self) -> bool:
            # After the setup, Lightning 2.6 ignores the user's weights_only=False: only what is sharded is loaded then.
            return not self.inner.replicates_state

        # Processes

        @property
        def root_device(self) -> Any:
            return self.parallel_devices[self.local_rank]

        @property
        def num_processes(self) -> int:
            """Number of processes on this machine."""
            return len(self.parallel_devices or ())

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            if self._inner is None:
                return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}
            # Ranks of tp and cp share their batches.  Where all do, the strategy may name no share.
            return {"num_replicas": 1, "rank": 0} | self._inner.distributed_sampler_kwargs

        def _configure_launcher(self) -> None:
            self._launcher = make_launcher(package, self, self._start_method)

        def set_world_ranks(self) -> None:
            """Number this process among those of all machines."""
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank

        def setup_environment(self) -> None:
            # The process group is dstrat's, which opens it for each run and closes it afterwards.
            super().setup_environment()
            reset_seed()
            self.set_world_ranks()
            request = Request(
                strategy=self.alias,
                accelerator=self.root_device.type,
                devices=self.num_processes,
                num_nodes=self.num_nodes,
                plugins=(LightningProcesses(self),),
            )
            if self._inner is None:  # a Trainer may run several times
                _, self._inner = resolve_request(request)
            self._inner.setup_environment()
            if self._inner.compiled_steps() is not None or self._inner.accumulates_gradients:
                raise ConflictError(
                    f"{type(self._inner).__name__} takes whole training steps, which Lightning's Trainer takes apart: "
                    f"use dstrat.Trainer(strategy={self.alias!r}), which runs the same LightningModule"
                )

        def setup(self, trainer: Any) -> None:
            if trainer.state.fn == "fit" and self.inner.trains_apart and self.inner.world_size > 1:
                raise ConflictError(
                    f"processes of {type(self.inner).__name__} train different weights, which the checkpoints of "
                    "Lightning's Trainer do not have, so that it cannot resume them: use "
                    f"dstrat.Trainer(strategy={self.alias!r}), which runs the same LightningModule"
                )
            self.accelerator.setup(trainer)
            # Before the module is moved, wrapped or sharded, as in the setup of Lightning's strategies.
            self.precision_plugin.convert_module(self.lightning_module)
            self.inner.connect(self.lightning_module)
            if synchronizes_batchnorm(self):
                self.inner.synchronize_batchnorm()
            self.inner.setup(FitSettings(trainer, self._make_optimizers))
            self.model = self.inner.model
            self.optimizers = list(self.inner.optimizers)
            self.setup_precision_plugin()

        def _make_optimizers(self) -> Optimization:
            # Lightning configures: it checks what the module returned, and steps the schedulers itself.
            optimizers, self.lr_scheduler_configs = make_optimizers(package, self.lightning_module)
            return Optimization(optimizers=tuple(optimizers))

        def model_to_device(self) -> None:
            """Do nothing: the setup of dstrat's strategy moves the module."""

        # Communication, which Lightning also asks for before and after a run

        def barrier(self, name: str | None = None) -> None:
            if dist.is_initialized():
                self.inner.barrier(name)

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return self.inner.broadcast(obj, src) if dist.is_initialized() else obj

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            return self.inner.reduce(tensor, group=group, reduce_op=reduce_op) if dist.is_initialized() else tensor

        # Evaluation, by the buffers that are saved, which are rank 0's

        def _start_evaluation(self) -> None:
            self._evaluation.enter_context(self.inner.evaluation_context())

        def _end_evaluation(self) -> None:
            self._evaluation.close()

        on_validation_start = on_test_start = on_predict_start = _start_evaluation
        on_validation_end = on_test_end = on_predict_end = _end_evaluation

        # Steps

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return self.inner.training_step(*args, **kwargs)

        def validation_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.val_step_context():
                return self.inner.validation_step(*args, **kwargs)

        def test_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.test_step_context():
                return self.inner.test_step(*args, **kwargs)

        def predict_step(self, *args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.predict_step_context():
                return self.inner.predict_step(*args, **kwargs)

        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            # dstrat's strategy prepares the pass and explains its errors; Lightning scales, calls hooks, and runs it.
            losses = []

            def run(loss: Any, *args: Any, **kwargs: Any) -> None:
                losses.append(base.backward(self, loss, optimizer, *args, **kwargs))

            self.inner.module_backward = run
            try:
                self.inner.backward(closure_loss, *args, **kwargs)
            finally:
                self.inner.module_backward = None  # it refers to this pass
            return losses[0]

        def block_backward_sync(self) -> Any:
            return self.inner.no_backward_sync()

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            # Lightning's precision calls optimizer.step within its scaler; what steps there is dstrat's strategy.
            step = partial(self.inner.optimizer_step, optimizer, **kwargs)
            return self.precision_plugin.optimizer_step(
                _Stepping(optimizer, step), model=model or self.lightning_module, closure=closure
            )

        # States

        def lightning_module_state_dict(self) -> dict[str, Any]:
            return self.inner.module_state_dict()

        def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            if self.restore_checkpoint_after_setup:
                self.inner.load_module_state_dict(checkpoint["state_dict"], strict=strict)
            else:
                self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            return self.inner.optimizer_state(unwrap_optimizer(optimizer))

        def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                self.inner.load_optimizer_state(optimizer, state)

        # The end

        def on_train_end(self) -> None:
            self.inner.finish_training()  # after the hooks of the same name

        def on_exception(self, exception: BaseException) -> None:
            super().on_exception(exception)
            self._has_failed = True
            if self._inner is not None:
                self._inner.on_exception(exception)

        def teardown(self) -> None:
            self._evaluation.close()  # of an evaluation that an exception has ended
            if self._inner is not None:
                self._keep_state()
                self._inner.teardown()
            self.model = self.lightning_module
            super().teardown()

        def _keep_state(self) -> None:
            # Lightning's launchers of multiprocessing send the module's state dict to the process that has called fit,
            # after the teardown, when no rank can gather shards any more.
            if self._start_method != "popen" and not self.inner.replicates_state and not self._has_failed:
                state = self.inner.module_state_dict()
                self.lightning_module.state_dict = lambda *_, **__: state

    class DstratDDPStrategy(DstratStrategy):
        """The same for dstrat's ddp, which libraries that ask for Lightning's ``DDPStrategy`` find."""

    library.DDPStrategy.register(DstratDDPStrategy)
    return DstratStrategy


def _blank_strategy(package: str, alias: str) -> Any:
    cls = strategy_class(package)
    return cls.__new__(cls, alias)


class _Stepping:
    """An optimizer whose ``step`` is the strategy's; everything else is the optimizer's.

    Args:
        optimizer: Of torch.
        step: Steps it with a closure.
    """

    def __init__(self, optimizer: Any, step: Any) -> None:
        self._optimizer, self.step = optimizer, lambda closure=None, **_: step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)
