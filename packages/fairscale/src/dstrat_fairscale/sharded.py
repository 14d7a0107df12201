"""FairScale's ShardedDataParallel: whole parameters, sharded gradients and optimizer state."""

from __future__ import annotations

import dataclasses
import inspect
import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_value_

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat.interfaces.state_dict import named_weights
from dstrat.parallel.collectives import give_plain_strides, running_statistics
from dstrat.parallel.gathered_optimizer import GatheredOptimizer
from dstrat.parallel.optimizer_checks import check_layout, check_one_dtype, check_optimizers, find_coupling
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.step_module import StepModule
from dstrat.parallel.strategy import ParallelStrategy
from dstrat_fairscale.internals import (
    ShardedDataParallel,
    ShardedGradScaler,
    ShardedOptimizer,
    expect_backward,
    rebind_scheduler,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.optimizers import SchedulerConfig
    from dstrat.interfaces.precision import ClipAlgorithm, Precision
    from dstrat.interfaces.strategy import TrainerLike


class DDPShardedStrategy(ParallelStrategy):
    """Training with FairScale's ShardedDataParallel and its sharded optimizer (OSS).

    Each rank keeps all parameters, and the gradients and optimizer state of its share of them.  FairScale is no longer
    developed: FSDPStrategy shards the parameters too.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The dtypes.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        find_unused_parameters: False; parameters that no rank uses in a step need no search.
        **kwargs: Passed to ShardedDataParallel, such as ``reduce_fp16`` and ``broadcast_buffers``.

    Raises:
        RequestError: ``find_unused_parameters`` is True.
        ConflictError: ``reduce_buffer_size`` is not 0.
        MisuseError: ShardedDataParallel has no such keyword.
    """

    replicates_state = False
    allows_new_optimizers = False  # they decide which rank has the gradients of a parameter

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

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        layout, ranks = training.replicated, training.world_size
        return dataclasses.replace(
            layout,
            gradients=math.ceil(layout.gradients / ranks),
            optimizer_state=math.ceil(layout.optimizer_state / ranks),
            optimizer_temporaries=math.ceil(layout.optimizer_temporaries / ranks),
        )

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        # Each gradient is reduced to the rank that steps its parameter, which sends that to all others.
        size, parameters = training.trainable_parameters, list(training.module.parameters())
        item = training.precision.param_dtype.itemsize
        gradients = size * min(2, item) // item if self._keywords.get("reduce_fp16") else size
        owners, trained = training.world_size, sum(parameter.requires_grad for parameter in parameters)
        collectives = [
            Collective(kind="reduce", bytes=gradients, messages=trained, ranks=owners, overlaps=True),
            Collective(kind="broadcast", bytes=size, messages=owners, ranks=owners),
        ]
        if training.module_buffers and self._keywords.get("broadcast_buffers", True):
            collectives.append(
                Collective(kind="broadcast", bytes=training.module_buffers, messages=1, ranks=training.world_size)
            )
        return CommunicationLayout(collectives=tuple(collectives), copied=2 * size)  # gradients are scaled

    def local_weights(self) -> dict[str, Any]:
        return named_weights(self.module)  # of the optimizer's state only are there shards

    # The life cycle

    def setup_optimizers(self, trainer: TrainerLike) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            give_plain_strides(tensor)  # FairScale broadcasts them as they are in memory
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers, self.module)
        check_one_dtype(self.module, "FairScale's ShardedDataParallel")
        for optimizer in self.optimizers:
            check_layout(optimizer)
            _check_independence(optimizer, type(self).__name__)
        self.optimizers = sharded_optimizers(self.optimizers, self.lr_schedulers)
        self.model = ShardedDataParallel(
            StepModule(self.module), self.optimizers, reduce_buffer_size=0, **self._keywords
        )

    def on_exception(self, exception: BaseException) -> None:
        self.model = self._module
        super().on_exception(exception)

    def teardown(self) -> None:
        self.model = self._module
        super().teardown()

    # Steps: only training goes through the wrapper, whose forward waits for the other ranks

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(self.model, self.module_step("training_step"))
        return self.run_step("training_step", step, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Otherwise only the first backward pass after a forward is reduced, of those that a step may run by itself.
        expect_backward(self.model)
        super().backward(loss, *args, **kwargs)

    def evaluation_context(self) -> AbstractContextManager[Any]:
        self.broadcast_tensors(running_statistics(self.module))
        return super().evaluation_context()

    def no_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being reduced."""
        if isinstance(self.model, ShardedDataParallel):
            context: AbstractContextManager[Any] = self.model.no_sync()
            return context
        return nullcontext()

    def clip_gradients(self, optimizer: Any, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        """Clip the gradients, of which each rank has its share, by what they are on all ranks together."""
        self.unscale_gradients(optimizer)
        if algorithm == "norm":
            optimizer.clip_grad_norm(clip_val)  # of FairScale, which sums the squares of all ranks
        else:
            clip_grad_value_([parameter for group in optimizer.param_groups for parameter in group["params"]], clip_val)


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


# FairScale's sharded optimizers (OSS)


def _check_independence(optimizer: Optimizer, strategy: str) -> None:
    """Raise a RequestError for an optimizer that cannot step the parameters of a rank by themselves."""
    if isinstance(optimizer, GatheredOptimizer):
        raise RequestError(
            f"{strategy} lets each rank step some of the parameters, in full: return the optimizer itself, without "
            "GatheredOptimizer"
        )
    reason = find_coupling(optimizer, may_draw=True)
    if reason is not None:
        raise RequestError(
            f"{type(optimizer).__name__} needs all parameters, and {strategy} lets each rank step some of them "
            f'({reason}): take another optimizer, such as torch.optim.AdamW, or choose strategy="ddp"'
        )


def sharded_optimizers(optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig]) -> list[Optimizer]:
    """Return sharded optimizers in the place of plain ones, to which the schedulers then belong.

    Args:
        optimizers: Not stepped yet.
        schedulers: Of these optimizers.
    """
    replaced: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        # The groups stay the same objects, so that what schedulers have changed in them holds.
        replaced[id(optimizer)] = ShardedOptimizer(optimizer.param_groups, type(optimizer), **_arguments(optimizer))
    for config in schedulers:
        rebind_scheduler(config.scheduler, replaced)
    return list(replaced.values())


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults that are arguments of the optimizer's class; torch's AdamW has others, also in its groups."""
    parameters = inspect.signature(type(optimizer)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in optimizer.defaults.items() if takes_all or name in parameters}
