"""Training with FairScale's ShardedDataParallel: whole parameters, sharded gradients and optimizer state."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.named_state import load_named_state, named_state
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fsdp.fairscale.optimizers import clip, gather_everywhere, load_whole_state, sharded_optimizers, whole_state
from dstrat_fsdp.optimizer_check import check_optimizers
from dstrat_fsdp.step_module import StepModule

with warnings.catch_warnings():  # FairScale is older than what torch deprecates
    warnings.simplefilter("ignore")
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.parts import TrainerLike
    from dstrat.interfaces.precision import ClipAlgorithm, Precision


class DDPShardedStrategy(ParallelStrategy):
    """Training with FairScale's ShardedDataParallel and its sharded optimizer (OSS).

    Each rank keeps all parameters, and the gradients and optimizer state of its share of them.  FairScale is no longer
    developed: FSDPStrategy shards the parameters too.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: Where the job runs.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The dtypes and what follows from them.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a collective waits for the other ranks before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        find_unused_parameters: False; parameters that no rank uses in a step need no search.
        **kwargs: Passed to ShardedDataParallel, such as ``reduce_fp16`` and ``broadcast_buffers``.

    Raises:
        RequestError: ``find_unused_parameters`` is True.
        ConflictError: ``reduce_buffer_size`` is not 0.
        MisuseError: ShardedDataParallel has no such keyword.
    """

    replicates_state = False

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        start_method: str = "popen",
        find_unused_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
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
        if find_unused_parameters:
            raise RequestError(
                f"{type(self).__name__} has no search for unused parameters, and needs none for those that no rank "
                "uses: leave find_unused_parameters out, or use strategy='ddp_find_unused_parameters_true'"
            )
        _check_keywords(kwargs, type(self))
        self._keywords = kwargs

    def precision_for(self, flag: str) -> Precision | None:
        """Return a precision whose loss scale is adapted by all ranks together, where the flag scales the loss."""
        if flag != "16-mixed":
            return None
        if not torch.cuda.is_available():
            raise RequestError("precision '16-mixed' of FairScale's strategies needs CUDA: choose 'bf16-mixed'")
        return MixedPrecision(flag, scaler=ShardedGradScaler())

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.module)
        self.optimizers = sharded_optimizers(self.optimizers, self.lr_schedulers)
        self.model = ShardedDataParallel(
            StepModule(self.module), self.optimizers, reduce_buffer_size=0, **self._keywords
        )

    def on_exception(self, exception: BaseException) -> None:
        self._unwrap()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._unwrap()
        super().teardown()

    def _unwrap(self) -> None:
        self.model = self._module

    # Steps: only training goes through the wrapper, whose forward waits for the other ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.forward_context():
            return self.model(self.module.training_step, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Otherwise only the first backward pass after a forward is reduced, of those that a step may run by itself.
        self.model._clear_counters()  # noqa: SLF001 - FairScale has no other way
        super().backward(loss, *args, **kwargs)

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being reduced."""
        if isinstance(self.model, ShardedDataParallel):
            context: AbstractContextManager[Any] = self.model.no_sync()
            return context
        return nullcontext()

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients, of which each rank has its share, by what they are on all ranks together."""
        self.unscale_gradients(optimizer)
        clip(optimizer, clip_val, algorithm)

    # State

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer on global rank 0, and an empty dict on the others; collective."""
        return whole_state(optimizer, self)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the whole state of an optimizer that global rank 0 has; collective."""
        load_whole_state(optimizer, state, self)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer by the names of its parameters, on each rank; collective."""
        gather_everywhere(optimizer)
        return named_state(optimizer, self.module)

    def load_sharded_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load the whole state of an optimizer; each rank keeps its share."""
        load_named_state(optimizer, self.module, {**state, "state": dict(state["state"])})


class DDPSpawnShardedStrategy(DDPShardedStrategy):
    """DDPShardedStrategy whose processes are started with ``spawn``, unless ``start_method`` says otherwise.

    Args:
        *args: As for DDPShardedStrategy.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **kwargs: As for DDPShardedStrategy.
    """

    def __init__(self, *args: Any, start_method: str = "spawn", **kwargs: Any) -> None:
        super().__init__(*args, **{"start_method": start_method, **kwargs})


def _check_keywords(keywords: Mapping[str, Any], owner: type) -> None:
    if keywords.get("reduce_buffer_size"):
        raise ConflictError(
            f"reduce_buffer_size={keywords['reduce_buffer_size']!r} trains wrongly with optimizers that set gradients "
            "to None, as torch's do, because FairScale's buffers keep the old ones: leave it out, it is 0"
        )
    known = [*inspect.signature(ShardedDataParallel).parameters][2:]
    for name in keywords:
        if name not in known:
            raise MisuseError(
                f"{owner.__name__} got {name!r}, which neither it nor FairScale's ShardedDataParallel knows; "
                f"possible are {', '.join(known)}"
            )
