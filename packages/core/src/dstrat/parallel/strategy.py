"""Base class of strategies that run one process per device over torch.distributed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS
from typing_extensions import override

from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.state_dict import canonical_parameters, has_standard_layout, with_names_of
from dstrat.interfaces.strategy import Strategy
from dstrat.interfaces.tied_parameters import keep_ties
from dstrat.parallel.collectives import (
    broadcast_object,
    broadcast_tensors,
    gather_tensors,
    reduce_tensor,
    uses_host_memory,
)
from dstrat.parallel.internals import BatchNorm, count_collectives
from dstrat.parallel.job import current_job
from dstrat.parallel.optimizer_checks import FirstParameters, StepGuard
from dstrat.parallel.process_group import (
    DEFAULT_HANG_TIMEOUT,
    DEFAULT_TIMEOUT,
    abort_process_group,
    check_same_catalog,
    close_process_group,
    open_process_group,
)
from dstrat.parallel.replicas import check_same_parameters, is_compared
from dstrat.parallel.shards import full_value
from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Components, TrainerLike
    from dstrat.parallel.job import Job


T = TypeVar("T")


class ParallelStrategy(Strategy):
    """A strategy with one process per device, communicating through torch.distributed.

    It has everything but the synchronization of the processes: a subclass overrides :meth:`wrap_model` and the methods
    that its wrapper changes.  No method is abstract.  For gradients that are synchronized after the backward pass,
    subclass :class:`~dstrat.parallel.gradient_sync.GradientSyncStrategy`.  The smallest complete subclass with a
    wrapper, which runs the step in its ``forward``::

        class MyStrategy(ParallelStrategy):
            def wrap_model(self, trainer):
                super().wrap_model(trainer)
                if trainer.is_fitting:
                    self.model = DistributedDataParallel(StepModule(self.module))

            def training_step(self, *args, **kwargs):
                step = partial(self.model, self.module_step("training_step"))
                return self.run_step("training_step", step, *args, **kwargs)

            def no_backward_sync(self):
                return self.model.no_sync()

    The first five arguments of the constructor, by position or by name, are components, see
    :class:`~dstrat.interfaces.strategy.Components`.  A class that users name documents them itself, for the help of
    command lines.

    Args:
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others, and how long it may be idle, before the job fails.  By default it
            waits for 30 minutes, and may be idle for 10.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Attributes:
        is_elastic: Whether a training can go on in the processes of the ranks that remain, when one was killed, see
            :meth:`check_elastic`.
        job: The open communication with the other ranks, from :meth:`setup_environment` to :meth:`teardown`; None at
            other times, and if the strategy opens communication by other means.
    """

    start_method: str | None = "popen"
    uses_torch_distributed = True
    timeout: timedelta = DEFAULT_TIMEOUT
    job: Job | None = None
    is_elastic = False
    _num_optimizer_steps = 0

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.add_components(parallel_devices=parallel_devices, cluster_environment=cluster_environment)
        self._root_device: torch.device | None = None
        self._synchronized_norm: SynchronizedNorm | None = None
        self._first_parameters = FirstParameters()
        self._step_guards: list[StepGuard] = []
        self.process_group_backend = process_group_backend
        self.timeout = timeout or DEFAULT_TIMEOUT
        # By identity: a user who writes 30 minutes means both times.
        self.hang_timeout = DEFAULT_HANG_TIMEOUT if timeout is None or timeout is DEFAULT_TIMEOUT else timeout
        if start_method is not None:
            self.start_method = start_method

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        self._root_device = None

    def __getstate__(self) -> dict[str, Any]:
        # Another process, or a copy, has others.
        of_a_run = {"_first_parameters": FirstParameters(), "_step_guards": []}
        return {**self.__dict__, "_root_device": None, "job": None, **of_a_run}

    # Rank and device of this process

    @property
    def parallel_devices(self) -> tuple[torch.device, ...]:
        """The devices of this machine, one for each local rank."""
        return self._present(self.components.parallel_devices, "devices")

    @property
    def cluster_environment(self) -> ClusterEnvironment:
        """Where the job runs."""
        return self._present(self.components.cluster_environment, "cluster environment")

    @property
    def assigned_device(self) -> torch.device:
        cls = type(self)
        if cls.root_device is not ParallelStrategy.root_device:  # a subclass that overrides only that one means both
            return self.root_device
        return self.parallel_devices[self.local_rank]

    @property
    def root_device(self) -> torch.device:
        if self._root_device is None:  # cached: needed with every batch, and reading the environment is slow
            cls, accelerator = type(self), self.components.accelerator
            is_replaced = cls.assigned_device is not ParallelStrategy.assigned_device
            device = self.assigned_device if is_replaced else self.parallel_devices[self.local_rank]
            self._root_device = device if accelerator is None else accelerator.device_in_process(device)
        return self._root_device

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def world_size(self) -> int:
        return self.cluster_environment.world_size

    @property
    def global_rank(self) -> int:
        return self.cluster_environment.global_rank

    @property
    def local_rank(self) -> int:
        return self.cluster_environment.local_rank

    @property
    def node_rank(self) -> int:
        return self.cluster_environment.node_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # The life cycle

    def connect(self, module: Module) -> None:
        super().connect(module)
        self._first_parameters = FirstParameters()

    def setup_environment(self) -> None:
        if self._module is not None:  # before its hooks, which may shard it
            self._first_parameters.record(self._module)
        self._root_device = None  # a forked rank has inherited the cached value of its parent
        self._num_optimizer_steps = 0  # with new ranks, all count anew
        super().setup_environment()
        store = self.open_communication()
        self.job = current_job()  # a subclass may return a store of its own
        check_same_catalog(get_catalog(), store, self.global_rank, self.world_size)

    def open_communication(self) -> dist.Store:
        """Open communication among the ranks, and return the store that they share; collective.

        A strategy whose library communicates by itself overrides it, :meth:`close_communication` and the collectives,
        and calls :func:`~dstrat.parallel.process_group.join_job` in it.
        """
        backend = self.process_group_backend or self.accelerator.process_group_backend
        return open_process_group(
            self.cluster_environment, backend=backend, timeout=self.timeout, device=self.root_device
        )

    def close_communication(self, *, aborts: bool) -> None:
        """Close communication, if it is open.

        Args:
            aborts: Whether an error ends the run, so that other ranks may be gone.
        """
        if aborts:
            abort_process_group()
        else:
            close_process_group()

    def setup(self, trainer: TrainerLike) -> None:
        self._first_parameters.record(self.module)
        super().setup(trainer)
        replaced = self._first_parameters.take_replaced(self.module)
        if trainer.is_fitting and replaced:  # something refers to them, such as an optimizer made too early
            self.refuse_steps(
                lambda: {name: reference() for name, reference in replaced.items()},
                f"in place of which {type(self.module).__name__} has others by now, as {type(self).__name__} may "
                "replace them, so that nothing is trained: make the optimizer later, from module.parameters(), in "
                "configure_optimizers or in the function that an own loop passes to setup",
            )

    def refuse_steps(self, parameters: Callable[[], Mapping[str, Tensor | None]], reason: str) -> None:
        """Let any optimizer of this process that steps one of these tensors raise MisuseError, until the teardown.

        Args:
            parameters: Returns the tensors that no optimizer steps in this strategy, by the names of parameters.
            reason: What the step of another optimizer would do, and what to do; see
                :class:`~dstrat.parallel.optimizer_checks.StepGuard`.
        """
        self._step_guards.append(StepGuard(parameters, reason))

    def model_to_device(self) -> None:
        with keep_ties(self.module):
            self.module.to(self.root_device)

    @override
    def wrap_model(self, trainer: TrainerLike) -> None:
        """Overwrite the parameters and buffers of all processes by those of global rank 0."""
        self.broadcast_tensors([*self.module.parameters(), *self.module.buffers()])

    def synchronize_batchnorm(self) -> None:
        layers = [name for name, layer in self.module.named_modules() if isinstance(layer, BatchNorm)]
        if layers and self.root_device.type == "cpu":
            raise RequestError(
                f"sync_batchnorm=True cannot work on the accelerator 'cpu', where torch has no SyncBatchNorm, and the "
                f"module has batch-norm layers ({layers[0]!r}): leave it out, or train on GPUs"
            )
        self._synchronized_norm = SynchronizedNorm(self.module)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.job = None
        self.close_communication(aborts=True)

    def teardown(self) -> None:
        for guard in self._step_guards:
            guard.remove()
        self._step_guards = []
        self._first_parameters = FirstParameters()  # of a setup that has failed
        if self._synchronized_norm is not None:
            self._synchronized_norm.undo()
            self._synchronized_norm = None
        try:
            super().teardown()
        finally:
            self.job = None
            self.close_communication(aborts=False)

    @override
    def check_elastic(self) -> None:
        if not self.is_elastic:
            super().check_elastic()
        backend = self.process_group_backend or self.accelerator.process_group_backend
        if backend != "gloo":
            raise ConflictError(
                f"elastic needs collectives that fail at once when a rank was killed, as those of gloo, and the "
                f"backend is {backend!r}: leave elastic out, and max_restarts restarts all ranks"
            )

    # Steps

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        self.check_replicas()
        if isinstance(optimizer, LBFGS):  # its line search depends on the loss, which must be the same on all ranks
            return super().optimizer_step(optimizer, lambda: self.reduce(closure()), model, **kwargs)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def check_replicas(self) -> None:
        """Compare the norms of parameters of which all ranks have replicas; collective, called once in each step.

        They are compared in steps 1, 2, 4, 8 ... of optimizers and in each 128th, as that waits for the device.

        Raises:
            MisuseError: They differ; on all ranks.
        """
        self._num_optimizer_steps += 1
        if self.compares_replicas and is_compared(self._num_optimizer_steps) and self.world_size > 1:
            largest = partial(self.reduce, reduce_op="max")
            check_same_parameters(self.replicated_parameters(), largest, self._num_optimizer_steps, type(self).__name__)

    def replicated_parameters(self) -> dict[str, Tensor]:
        """Return the parameters of which all ranks must have the same values between steps, by name."""
        if self.trains_apart or not self.replicates_state:
            return {}
        return dict(self.module.named_parameters())

    # State of an optimizer in shards

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if not self.replicates_state and has_standard_layout(state):
            from dstrat.parallel.full_state import shard_entries

            state = shard_entries(state, canonical_parameters(self.module))
        super().load_sharded_optimizer_state(optimizer, state)

    # Full state: gathered on global rank 0, and scattered from it, where ranks hold shards.  The imports bring DTensor.

    def module_state_dict(self) -> dict[str, Any]:
        if self.replicates_state:
            return super().module_state_dict()
        from dstrat.parallel.full_state import gather_entries

        return gather_entries(self.sharded_module_state(), self)

    def stream_weights(
        self, *, everywhere: bool = False, selects: Callable[[str], bool] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if self.replicates_state:
            return super().stream_weights(everywhere=everywhere, selects=selects)
        from dstrat.parallel.full_state import stream_tensors

        return stream_tensors(self.sharded_module_state(), self, everywhere=everywhere, selects=selects)

    def load_module_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        if self.replicates_state:
            super().load_module_state_dict(state, strict)
            return
        from dstrat.parallel.full_state import scatter_module_state

        targets = self.sharded_module_state()
        state = with_names_of(targets, state)
        self.load_sharded_module_state(scatter_module_state(self, state, targets, strict=strict))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self.replicates_state:
            return super().optimizer_state(optimizer)
        from dstrat.parallel.full_state import gather_optimizer_state

        return gather_optimizer_state(self.sharded_optimizer_state(optimizer), self)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        if self.replicates_state:
            super().load_optimizer_state(optimizer, state)
            return
        from dstrat.parallel.full_state import scatter_optimizer_state

        self.load_sharded_optimizer_state(optimizer, scatter_optimizer_state(self, optimizer, state))

    # Communication

    def reduce(
        self, tensor: Any, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp | None = "mean"
    ) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        value: Tensor = full_value(tensor)  # of a DTensor, such as a loss that is computed in parallel
        return reduce_tensor(self._on_device(value), group=group, reduce_op=reduce_op).to(value.device)

    def broadcast(self, obj: T, src: int = 0) -> T:
        return broadcast_object(obj, src=src)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        device = self.root_device
        # Else torch guesses the device, and warns.
        if device.index is not None and not uses_host_memory():
            dist.barrier(device_ids=[device.index])
        else:
            dist.barrier()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of global rank 0; collective.

        Args:
            tensors: Tensors on the device, of the same shapes and dtypes on every rank.
        """
        broadcast_tensors(tensors)

    take_from_first_rank = broadcast_tensors  # its first name

    def collectives_begun(self) -> int:
        return count_collectives()

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        value: Tensor = tensor if sync_grads else full_value(tensor)
        return gather_tensors(self._on_device(value), group=group, sync_grads=sync_grads).to(value.device)

    def _on_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host, such as a count, where the backend sends it from."""
        can_be_sent = tensor.device.type == self.root_device.type or uses_host_memory()
        return tensor if can_be_sent else tensor.to(self.root_device)


# Synchronized batch norm during a training


class SynchronizedNorm:
    """Replaces a module's batch-norm layers by torch's SyncBatchNorm, until :meth:`undo`.

    Args:
        module: The module, which is changed in place.
    """

    def __init__(self, module: Module) -> None:
        self._replaced = [
            (parent, name, layer)
            for parent in module.modules()
            for name, layer in parent.named_children()  # a layer that is the module itself has no parent to change
            if isinstance(layer, BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        ]
        synchronized: dict[int, Module] = {}  # of a layer that several parents share, there is one
        for parent, name, layer in self._replaced:
            if id(layer) not in synchronized:
                synchronized[id(layer)] = nn.SyncBatchNorm.convert_sync_batchnorm(layer)
            parent.add_module(name, synchronized[id(layer)])

    def undo(self) -> None:
        """Restore the layers, with the trained weights, statistics and mode."""
        # Into the layers that the user made, of which the program may have references.
        for parent, name, layer in self._replaced:
            synchronized = parent.get_submodule(name)
            layer._parameters, layer._buffers = synchronized._parameters, synchronized._buffers  # noqa: SLF001 - all of both
            layer.training = synchronized.training
            parent.add_module(name, layer)
        self._replaced = []
