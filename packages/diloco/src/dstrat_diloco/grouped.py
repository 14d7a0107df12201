"""Base of strategies that let another strategy train each of several groups of ranks."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.strategy import Components, Strategy
from dstrat.parallel.job import current_job
from dstrat.parallel.process_group import DEFAULT_TIMEOUT, check_same_catalog
from dstrat.parallel.strategy import ParallelStrategy
from dstrat.plugins.catalog import get_catalog
from dstrat_diloco.groups import Division, GroupEnvironment, RankGroups, divide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import StepName, TrainerLike

T = TypeVar("T")


def _of_inner(name: str) -> Any:
    """Return a property with the value of the same attribute of the inner strategy."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
    )


class GroupedStrategy(ParallelStrategy):
    """A strategy whose ranks are in groups, each of which another strategy trains as if it were the job.

    In calls of the inner strategy the default group of torch.distributed is the group; outside of them it is the job.
    The inner strategy has module, model, optimizers and steps; what a caller reduces, broadcasts and gathers is of all
    ranks.

    Args:
        inner: The inner strategy, as an alias or an instance without components.
        groups: Number of groups; None for one for each machine, or on a single one for each rank.
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Attributes:
        inner: The inner strategy.

    Raises:
        MisuseError: The inner strategy is no strategy, or has components.
        RequestError: The number of groups is none.
        ConflictError: The inner strategy cannot train a group.
    """

    _groups: RankGroups | None = None

    def __init__(
        self,
        inner: str | Strategy,
        groups: int | None,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str | None = None,
    ) -> None:
        if groups is not None and (type(groups) is not int or groups < 1):
            raise RequestError(f"groups={groups!r} is not a whole number from 1, or None")
        self.inner = _checked_inner(inner)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
        )
        self._num_groups = groups

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_groups": None}

    # What the inner strategy has

    _module = _of_inner("_module")
    _is_set_up = _of_inner("_is_set_up")
    model = _of_inner("model")
    optimizers = _of_inner("optimizers")
    lr_schedulers = _of_inner("lr_schedulers")
    module_backward = _of_inner("module_backward")
    weigh_batch = _of_inner("weigh_batch")
    step_methods = _of_inner("step_methods")
    saved_activations = _of_inner("saved_activations")
    replicates_state = _of_inner("replicates_state")
    saves_full_state = _of_inner("saves_full_state")
    saves_gradients = _of_inner("saves_gradients")
    evaluates_together = _of_inner("evaluates_together")
    allows_inference_mode = _of_inner("allows_inference_mode")
    replicas_per_process = _of_inner("replicas_per_process")
    weighs_losses = _of_inner("weighs_losses")
    prefetches = _of_inner("prefetches")
    copies_ahead = _of_inner("copies_ahead")

    # Groups

    @property
    def groups(self) -> RankGroups:
        """The groups of ranks, while communication is open."""
        return self._present(self._groups, "groups of ranks")

    def _division(self, world_size: int, ranks_per_machine: int) -> Division:
        return divide(self._num_groups, world_size=world_size, ranks_per_machine=ranks_per_machine)

    def _in_group(self) -> AbstractContextManager[Any]:
        """Return a context in which the default group of torch.distributed is this rank's group."""
        return nullcontext() if self._groups is None else self._groups.as_default(self._groups.group)

    def _in_job(self) -> AbstractContextManager[Any]:
        """Return a context in which it is the job, also within a call of the inner strategy."""
        return nullcontext() if self._groups is None else self._groups.as_default(self._groups.job)

    def _of_group(self, training: TrainingSize) -> TrainingSize:
        """Return the sizes of the training as a group sees it."""
        division = self._division(training.world_size, training.ranks_per_machine)
        return dataclasses.replace(training, world_size=division.size, ranks_per_machine=division.local_size)

    def precision_for(self, flag: str) -> Precision | None:
        return self.inner.precision_for(flag)

    def forward_dtype(self, precision: Precision) -> torch.dtype:
        return self.inner.forward_dtype(precision)

    def check_training(self, training: TrainingSize) -> None:
        self._check_steps()
        of_group = self._of_group(training)
        communication = self.inner.communication_layout(of_group)
        if communication is not None and communication.ranks_per_batch > 1:
            raise self._shared_batches_error()
        self.inner.check_training(of_group)

    def describe_layout(self, world_size: int, ranks_per_machine: int) -> Sequence[tuple[str, str, str]]:
        division = self._division(world_size, ranks_per_machine)
        reason = "asked for" if self._num_groups else "one for each machine"
        if division.size < ranks_per_machine and not self._num_groups:
            reason = "one for each device, as there is one machine"
        ranks = "1 rank" if division.size == 1 else f"{division.size} ranks"
        row = ("groups", f"{division.num_groups} of {ranks}, each by {type(self.inner).__name__}", reason)
        return (row, *self.inner.describe_layout(division.size, division.local_size))

    @property
    def device_mesh(self) -> DeviceMesh:
        with self._in_group():
            return self.inner.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return self._of_all_groups(self.inner.distributed_sampler_kwargs)

    @property
    def training_sampler_kwargs(self) -> dict[str, int]:
        return self._of_all_groups(self.inner.training_sampler_kwargs)

    def _of_all_groups(self, in_group: Mapping[str, int]) -> dict[str, int]:
        readers, rank = in_group.get("num_replicas", 1), in_group.get("rank", 0)
        division = self._division(self.world_size, len(self.parallel_devices))  # also after the groups have ended
        group = self.global_rank // division.size
        return {"num_replicas": division.num_groups * readers, "rank": group * readers + rank}

    # The life cycle

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        self.inner.set_components(self.components)  # until its group is known

    def connect(self, module: Module) -> None:
        self.inner.connect(module)

    def setup_environment(self) -> None:
        self._root_device = None  # a forked rank has inherited that of its parent
        inner, division = self.inner, self._division(self.world_size, len(self.parallel_devices))
        first = self.local_rank - self.local_rank % division.local_size
        inner.set_components(
            Components(
                accelerator=self.accelerator,
                parallel_devices=self.parallel_devices[first : first + division.local_size],
                cluster_environment=GroupEnvironment(self.cluster_environment, division),
                checkpoint_io=self.checkpoint_io,
                precision_plugin=self.precision_plugin,
            )
        )
        # It prepares the device, and communication is opened where it opens its own, with the backend that it needs.
        if isinstance(inner, ParallelStrategy):
            inner.process_group_backend = inner.process_group_backend or self.process_group_backend
            inner.timeout = self.timeout
            inner.open_communication = lambda: self._open_group(division, inner.process_group_backend)  # type: ignore[method-assign]
            inner.close_communication = lambda *, aborts: None  # type: ignore[method-assign]  # noqa: ARG005
        elif division.size > 1:
            raise ConflictError(
                f"inner={type(inner).__name__} trains on one rank, and groups={division.num_groups} have "
                f"{division.size} each: give groups={self.world_size}, or another inner strategy"
            )
        try:
            inner.setup_environment()
            if self._groups is None:
                self._open_group(division, self.process_group_backend)
        finally:
            if self._groups is not None:
                dist.group.WORLD = self._groups.job

    def _open_group(self, division: Division, backend: str | None) -> dist.Store:
        """Open communication of the job and its groups, and return the store of this rank's group; collective.

        The default group is this rank's group then.
        """
        self.process_group_backend = backend
        store = self.open_communication()
        self.job = current_job()
        check_same_catalog(get_catalog(), store, self.global_rank, self.world_size)
        backend = backend or self.accelerator.process_group_backend
        self._groups = RankGroups(division, backend=backend, timeout=self.timeout)
        dist.group.WORLD = self._groups.group
        return dist.PrefixStore(f"group {self._groups.index}", store)

    def setup(self, trainer: TrainerLike) -> None:
        self._check_steps()
        division = self._division(self.world_size, len(self.parallel_devices))
        if self.inner.distributed_sampler_kwargs.get("num_replicas", 1) != division.size:
            raise self._shared_batches_error()
        with self._in_group():
            self.inner.setup(trainer)

    def _check_steps(self) -> None:
        if self.inner.compiled_steps() is not None:
            raise ConflictError(
                f"inner={type(self.inner).__name__} compiles training steps with these options, or runs pipelines, and "
                "a group cannot be trained so: leave that out"
            )

    def _shared_batches_error(self) -> ConflictError:
        return ConflictError(
            f"inner={type(self.inner).__name__} lets ranks share batches with these options, as tensor and context "
            "parallelism do, and a group cannot be trained so: leave that out"
        )

    def check_set_up(self) -> None:
        self.inner.check_set_up()

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        with self._in_group():
            self.inner.setup_optimizers(trainer)

    def synchronize_batchnorm(self) -> None:
        with self._in_group():
            self.inner.synchronize_batchnorm()

    def model_to_device(self) -> None:
        self.inner.model_to_device()

    def finish_training(self) -> None:
        with self._in_group():
            self.inner.finish_training()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)  # first, as the inner strategy may wait for collectives on its device
        self.inner.on_exception(exception)

    def teardown(self) -> None:
        try:
            self.inner.teardown()  # not in its group, as the ranks that save a checkpoint are those of the job
        finally:
            self.job = None
            self.close_communication(aborts=False)

    def close_communication(self, *, aborts: bool) -> None:
        self._groups = None  # process groups close with their last reference
        super().close_communication(aborts=aborts)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self.inner.tensor_init_context()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        with self._in_group(), self.inner.model_sharded_context():
            yield

    # Steps

    def process_dataloader(self, dataloader: Any) -> Any:
        return self.inner.process_dataloader(dataloader)

    def process_evaluation_dataloader(self, dataloader: Any) -> Any:
        return self.inner.process_evaluation_dataloader(dataloader)

    def prefetch(self, items: Iterable[T], move: Callable[[T], T]) -> Iterator[T]:
        return self.inner.prefetch(items, move)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.inner.batch_to_device(batch, device, dataloader_idx)

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with self._in_group():
            return self.inner.run_step(name, step, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_group():
            return self.inner.training_step(*args, **kwargs)

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        with ExitStack() as stack:
            with self._in_group():
                stack.enter_context(self.inner.evaluation_context())
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_group():
            return self.inner.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_group():
            return self.inner.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_group():
            return self.inner.predict_step(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self._in_group():
            self.inner.backward(loss, *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        return self.inner.no_backward_sync()

    def mean_weight(self, weight: Tensor) -> Tensor:
        with self._in_group():
            return self.inner.mean_weight(weight)

    def scale_gradients(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        self.inner.scale_gradients(optimizer, factor)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        with self._in_group():
            self.inner.unscale_gradients(optimizer)

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        with self._in_group():
            self.inner.clip_gradients(optimizer, clip_val, algorithm)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        with self._in_group():
            return self.inner.optimizer_step(optimizer, closure, model, **kwargs)

    # Communication among all ranks

    @override
    def reduce(
        self, tensor: Any, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp | None = "mean"
    ) -> Any:
        with self._in_job():
            return super().reduce(tensor, group, reduce_op)

    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._in_job():
            return super().broadcast(obj, src)

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        with self._in_job():
            super().barrier(name)

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        with self._in_job():
            super().broadcast_tensors(tensors)

    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        with self._in_job():
            return super().all_gather(tensor, group, sync_grads)

    # State

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        with self._in_job():  # also within a step
            super().save_checkpoint(checkpoint, path)

    def sharded_module_state(self) -> dict[str, Any]:
        with self._in_group():
            return self.inner.sharded_module_state()

    def load_sharded_module_state(self, state: dict[str, Any]) -> None:
        with self._in_group():
            self.inner.load_sharded_module_state(state)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._in_group():
            return self.inner.sharded_optimizer_state(optimizer)

    def parameter_names(self, optimizer: Optimizer) -> Sequence[Sequence[str]]:
        return self.inner.parameter_names(optimizer)

    def optimizer_template(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._in_group():
            return self.inner.optimizer_template(optimizer)

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        with self._in_group():
            self.inner.load_sharded_optimizer_state(optimizer, state)

    def local_weights(self) -> dict[str, Any]:
        with self._in_group():
            return self.inner.local_weights()

    def accept_local_weights(self) -> None:
        with self._in_group():
            self.inner.accept_local_weights()


def _checked_inner(inner: str | Strategy) -> Strategy:
    """Return the inner strategy, constructed if it is an alias.

    Raises:
        CatalogError: No usable strategy has that alias.
        MisuseError: It is no strategy, or has components.
        ConflictError: It cannot train a group.
    """
    if isinstance(inner, str):
        catalog = get_catalog()
        offer = catalog.find("strategy", inner)
        catalog.check_requirements(offer)
        strategy: Any = catalog.load(offer)(**offer.component.options)
        label = repr(inner)
    else:
        strategy, label = inner, type(inner).__name__
    if not isinstance(strategy, Strategy):
        raise MisuseError(f"inner={inner!r} is neither the alias nor an instance of a strategy, such as 'fsdp'")
    if any(getattr(strategy.constructor_components, field.name) for field in dataclasses.fields(Components)):
        raise MisuseError(f"inner={label} has components of its own, such as a precision: give them to the outer one")
    # What opens another communication, or lets a library own the optimizers, takes no group of torch.distributed.
    opens = getattr(type(strategy), "open_communication", None)
    is_parallel = isinstance(strategy, ParallelStrategy) and opens is ParallelStrategy.open_communication
    is_alone = not (strategy.uses_torch_distributed or strategy.start_method or strategy.drives_several_devices)
    if (
        not (is_parallel or is_alone)
        or not strategy.allows_new_optimizers
        or strategy.accumulates_gradients
        or isinstance(strategy, GroupedStrategy)
    ):
        raise ConflictError(
            f"inner={label} cannot train a group of ranks, as its library owns the communication or the optimizers: "
            "'ddp', 'fsdp' and 'single_device' can"
        )
    return strategy
