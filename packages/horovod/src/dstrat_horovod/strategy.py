"""HorovodStrategy: one process per device, gradients reduced by Horovod."""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from typing_extensions import override

from dstrat.errors import ConflictError, MisuseError, PeerError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import load_named_state, named_state
from dstrat.launch.rank import this_rank
from dstrat.parallel.process_group import DEFAULT_TIMEOUT, join_job, leave_job
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_horovod.communication import Communication
from dstrat_horovod.gradients import AdasumUpdates, GradientReduction, ReductionOptions, operation_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch.distributed import Store
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Components, TrainerLike
    from dstrat.parallel.job import Channel

T = TypeVar("T")

_FUSION_BYTES = 128 * 2**20  # Horovod's default of HOROVOD_FUSION_THRESHOLD

_REPORT_SECONDS = 3.0  # in which another rank writes its error and ends

_logger = logging.getLogger(__name__)


class HorovodStrategy(ParallelStrategy):
    """Training with Horovod, on one or several machines.

    Each device has a process with a replica of the module.  Horovod reduces gradients while the backward pass is still
    computing, and carries all other communication too; torch.distributed is not used.  Processes are started by
    dstrat, by horovodrun, or by any other launcher that dstrat knows.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        cluster_environment: Where the job runs.
        compression: ``"none"``, ``"fp16"``, or a class like ``horovod.torch.Compression.fp16``.
        op: ``"Average"``, ``"Sum"`` or ``"Adasum"``, or Horovod's constant.
        gradient_predivide_factor: With an average: gradients are divided by it before the sum, and the sum by the
            rest of the number of ranks.
        num_groups: Number of groups of gradients that are reduced together; 0 lets Horovod fuse them.
        groups: The same, or lists of parameters or their names, one list for each group.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        timeout: How long a collective waits for the other ranks before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.

    Raises:
        RequestError: There is no such compression or operation.
        ConflictError: Two options exclude each other.
    """

    uses_torch_distributed = False
    compares_replicas = True
    allows_new_optimizers = False  # Horovod's hooks reduce gradients for those of the setup
    allows_inference_mode = False  # Horovod's thread resizes its results, which tensors of that mode refuse

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        compression: Any = "none",
        op: Any = "Average",
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Tensor | str]] | None = None,
        sparse_as_dense: bool = False,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            timeout=timeout,
            start_method=start_method,
        )
        if num_groups and groups is not None:
            raise ConflictError(f"num_groups={num_groups!r} and groups={groups!r} say the same: pass one of them")
        self.reduction_options = ReductionOptions(
            op=operation_of(op),
            compression=compression,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups if groups is not None else num_groups or None,
            sparse_as_dense=sparse_as_dense,
        )
        self._communication: Communication | None = None
        self._reduction: GradientReduction | None = None
        self._adasum: AdasumUpdates | None = None
        self._frozen: list[Parameter] = []
        self._is_accumulating = False

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        options, size = self.reduction_options, training.trainable_parameters
        if options.op == "Adasum" or options.compression not in ("none", "fp16"):
            return None
        if options.compression == "fp16":
            size = min(size, 2 * training.trainable_numel)
        gradients = Collective(
            kind="all_reduce",
            bytes=size,
            messages=max(1, math.ceil(size / _FUSION_BYTES)),
            ranks=training.world_size,
            overlaps=True,
        )
        return CommunicationLayout(collectives=(gradients,), copied=4 * size)  # into a buffer of several, and back

    @property
    def communication(self) -> Communication:
        """Horovod, initialized with the ranks of the job."""
        if self._communication is None:
            raise MisuseError("HorovodStrategy communicates from setup_environment on, and it was not called yet")
        return self._communication

    # The life cycle

    def set_components(self, components: Components) -> None:
        super().set_components(components)
        size = max(len(self.parallel_devices), self.world_size)
        if self.reduction_options.op == "Adasum" and size & (size - 1):
            raise ConflictError(
                f"op='Adasum' combines ranks in pairs, and {size} is no power of 2: train on 2, 4, 8 ... devices"
            )

    def open_communication(self) -> Store:
        store = join_job(self.cluster_environment, timeout=self.timeout, open_channel=self._open_channel)
        num_local = len(self.parallel_devices)
        self._communication = Communication(self.cluster_environment, num_local, store, timeout=self.timeout)
        return store

    def _open_channel(self) -> Channel:
        return self.communication.open_channel()

    def close_communication(self, *, aborts: bool) -> None:
        if self._communication is not None:
            self._communication.close(aborts=aborts)
            self._communication = None
        leave_job()

    def synchronize_batchnorm(self) -> None:
        raise MisuseError(
            "sync_batchnorm=True needs torch.distributed, which Horovod replaces: use horovod.torch.SyncBatchNorm in "
            "the module, on GPUs, or strategy='ddp'"
        )

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        # As Horovod's broadcast_optimizer_state does: programs for Horovod load a state on rank 0 only.
        for optimizer in self.optimizers:
            state = self.broadcast(optimizer.state_dict())
            if not self.is_global_zero:
                optimizer.load_state_dict(state)
        if self.world_size == 1:
            return
        if self.reduction_options.op == "Adasum":
            self._adasum = AdasumUpdates(self.communication, self.module, self.reduction_options)
        else:
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        """Let Horovod reduce the gradients of the parameters that are trainable now."""
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None
        parameters = list(self.module.parameters())
        # Horovod has hooks on those that are trainable now: training_step looks for ones that are so later.
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        if len(self._frozen) == len(parameters):
            name = type(self.module).__name__
            _logger.info("%s has no trainable parameter, so that there is nothing to reduce", name)
            return
        self._reduction = GradientReduction(self.communication, self.module, self.reduction_options)

    def on_exception(self, exception: BaseException) -> None:
        if self._communication is not None:
            self._communication.record_failure(exception)
        if isinstance(exception, PeerError) and this_rank() is None:
            # horovodrun kills all ranks when the first one ends: the rank that failed is to write its error before.
            time.sleep(_REPORT_SECONDS)
        self._end_training()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._end_training()
        super().teardown()

    def _end_training(self) -> None:
        if self._reduction is not None:  # or a later backward pass of the user would communicate
            self._reduction.close()
        self._reduction, self._adasum, self._frozen = None, None, []
        self._is_accumulating = False

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._frozen and any(parameter.requires_grad for parameter in self._frozen):
            _logger.info("%s has more trainable parameters than before", type(self.module).__name__)
            self._reduce_gradients()
        return super().training_step(*args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Its hooks begin the reductions, which fail at once where a peer has ended before.
        with self.communication.lost_peers("gradients"):
            super().backward(loss, *args, **kwargs)
        if self._reduction is not None and not self._is_accumulating:
            self._reduction.synchronize()

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        was_accumulating, self._is_accumulating = self._is_accumulating, True
        with nullcontext() if self._reduction is None else self._reduction.accumulation():
            try:
                yield
            finally:
                self._is_accumulating = was_accumulating

    @property
    def weighs_losses(self) -> bool:
        return self.reduction_options.op == "Average" or self.world_size == 1

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        if self._adasum is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        step = super().optimizer_step
        return self._adasum.step(lambda: step(optimizer, closure, model, **kwargs))

    def rank_state(self) -> dict[str, Any]:
        if self._adasum is None:
            return super().rank_state()
        # Each rank steps the optimizer with its own gradients, so that its state is another in each.
        states = [named_state(optimizer, self.module) for optimizer in self.optimizers]
        return {**super().rank_state(), "optimizers": states}

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        super().load_rank_state(state)
        if self._adasum is not None and "optimizers" in state:  # another operation may have saved it
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                load_named_state(optimizer, self.module, saved)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        # Each rank has statistics of its own data in buffers, such as those of batch norm; a checkpoint has rank 0's.
        self.broadcast_tensors(self.module.buffers())
        return super().evaluation_context()

    # Communication

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor reduced over all ranks, or those of a ``horovod.torch.ProcessSet``."""
        return self.communication.reduce(tensor, reduce_op, group) if isinstance(tensor, Tensor) else tensor

    def broadcast(self, obj: T, src: int = 0) -> T:
        value: T = self.communication.broadcast(obj, src)
        return value

    @override
    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.communication.barrier(name)

    def collectives_begun(self) -> int:
        return self.communication.num_begun

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        self.communication.broadcast_tensors(tensors)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return self.communication.all_gather(tensor, group, sync_grads=sync_grads)
