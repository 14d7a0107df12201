"""Fully sharded data parallel training: parameters, gradients and optimizer state in shards, one on each rank."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from dstrat.errors import ConflictError, RequestError
from dstrat.interfaces.communication import CommunicationLayout
from dstrat.parallel.activation_memory import ActivationMemory
from dstrat.parallel.layers import checked_policy
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_fsdp.communication import bytes_from_host, copied_bytes, python_hooks, sharded_collectives
from dstrat_fsdp.memory import Division, Divisions, ShardedTraining, estimated_blocks, sharded_layout
from dstrat_fsdp.mesh import REPLICATE, SHARD, checked_mesh, open_mesh, sharding_mesh_shape
from dstrat_fsdp.options import (
    offloads_to_host,
    precision_policy,
    prefetches_backward,
    refuse_unknown,
    sharding_name,
    state_dict_type_name,
)
from dstrat_fsdp.sharded_strategy import ShardedStrategy
from dstrat_fsdp.wrap_policy import blocks_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        CPUOffloadPolicy,
        MixedPrecision,
        MixedPrecisionPolicy,
        ShardingStrategy,
    )
    from torch.nn import Module

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.parallel.layers import LayerClasses, LayerPolicy
    from dstrat_fsdp.options import ShardingName
    from dstrat_fsdp.sharded_module import Sharding
    from dstrat_fsdp.wrap_policy import WrapPolicy

_logger = logging.getLogger(__name__)


class FSDPStrategy(ShardedStrategy):
    """Training with torch's ``fully_shard`` on one or several machines, on CPUs too.

    Each rank keeps a shard of each parameter with its gradient and optimizer state.  A block of layers is gathered
    before its forward and its backward pass, and freed after it.  Losses are those of one device.

    Layers may be made in ``configure_model``, where their parameters take no memory until they are sharded; the module
    may also call ``fully_shard`` on parts of itself there, with ``device_mesh``.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        precision_plugin: The precision; parameters are gathered in the dtype that it computes in.
        cpu_offload: Whether shards and the optimizer's step are on the CPU; True, or torch's policy.
        mixed_precision: Torch's policy of dtypes, with or without a ``precision``: batches are cast to its dtype, too.
            None takes that of the precision plugin.
        auto_wrap_policy: The blocks: classes of layers, a function of a module, or the least number of parameters;
            None takes the module's ``auto_wrap_policy``, if it has one, or else repeated layers.
        activation_checkpointing: What is not saved for the backward pass, and computed again: ``"full"`` or
            ``"selective"`` for repeated layers, or classes of layers.
        activation_checkpointing_policy: The layers, as classes or a function of a module.
        activation_offload: Whether repeated layers save their activations on the host; True, or the layers.
        sharding_strategy: ``"FULL_SHARD"``; ``"SHARD_GRAD_OP"`` keeps blocks gathered until their backward pass;
            ``"HYBRID_SHARD"`` shards inside a machine and replicates between machines; ``"NO_SHARD"`` replicates.
        state_dict_type: The parameters after a run: ``"sharded"``, or ``"full"`` on each rank.
        device_mesh: ``(shards,)`` or ``(replicas, shards)``; None follows from the sharding strategy.
        backward_prefetch: ``"BACKWARD_PRE"`` gathers a block while gradients of the one after it are computed,
            ``"BACKWARD_POST"`` when they are, which takes less memory; or torch's enumeration.
        reshard_after_forward: Whether blocks are freed after their forward pass; a number keeps shards of a smaller
            mesh of that size.  None follows from the sharding strategy.
        **unknown: Anything else is an error, with a hint for the options of torch's earlier FSDP.

    Raises:
        RequestError: An option has an impossible value.
        ConflictError: Two options exclude each other.
    """

    is_elastic = True

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: bool | CPUOffloadPolicy | CPUOffload | None = None,
        mixed_precision: MixedPrecisionPolicy | MixedPrecision | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: LayerClasses | str | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        sharding_strategy: str | ShardingStrategy | None = None,
        state_dict_type: str = "sharded",
        device_mesh: DeviceMesh | tuple[int, ...] | None = None,
        *,
        activation_offload: bool | LayerPolicy = False,
        backward_prefetch: str | BackwardPrefetch | None = None,
        reshard_after_forward: bool | int | None = None,
        start_method: str = "popen",
        **unknown: Any,
    ) -> None:
        refuse_unknown(FSDPStrategy, unknown)
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
        self._cpu_offload = cpu_offload
        self._prefetches_backward = prefetches_backward(backward_prefetch)
        self._mixed_precision = mixed_precision
        self.saved_activations = ActivationMemory.of(
            activation_checkpointing, activation_checkpointing_policy, activation_offload
        )
        self._auto_wrap_policy = checked_policy("auto_wrap_policy", auto_wrap_policy, or_size=True)
        self._sharding_strategy = sharding_name(sharding_strategy)
        self._state_dict_type = state_dict_type_name(state_dict_type)
        self._requested_mesh = checked_mesh(device_mesh)
        self._reshard_after_forward = _reshards(reshard_after_forward, self._sharding_strategy)

    @override
    def check_elastic(self) -> None:
        super().check_elastic()
        is_fixed = self._requested_mesh is not None or self._sharding_strategy == "HYBRID_SHARD"
        if is_fixed or not isinstance(self._reshard_after_forward, bool):
            raise ConflictError(
                f"elastic shards over the ranks that remain, and {type(self).__name__} has a number of ranks, by "
                "device_mesh, HYBRID_SHARD or reshard_after_forward: leave one of them out"
            )

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size == 1:
            _logger.info("there is one process, so that nothing is sharded")

    @classmethod
    def layout_options(cls, module: Module, world_size: int, ranks_per_machine: int) -> Sequence[Mapping[str, Any]]:  # noqa: ARG003 - the same for all
        return ({}, {"activation_checkpointing": "full"})

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        return sharded_layout(self._estimated(training))

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        sharded = self._estimated(training)
        collectives = sharded_collectives(sharded)
        return CommunicationLayout(
            collectives=collectives,
            copied=copied_bytes(collectives),
            copied_from_host=bytes_from_host(sharded),
            hooks=python_hooks(sharded),
        )

    def _estimated(self, training: TrainingSize) -> ShardedTraining:
        *replicas, shards = self._mesh_shape(training.world_size, training.ranks_per_machine)
        return ShardedTraining(
            training=training,
            blocks=estimated_blocks(training.module, self._auto_wrap_policy),
            divisions=Divisions(Division(shards=shards)),
            policy=precision_policy(self._mixed_precision, training.precision),
            frees_blocks=self._reshard_after_forward is not False,
            offloads=offloads_to_host(self._cpu_offload, training.device_type),
            num_replicas=math.prod(replicas),
        )

    def _mesh_shape(self, world_size: int, per_machine: int) -> tuple[int, ...]:
        return sharding_mesh_shape(
            self._sharding_strategy, self._requested_mesh, world_size=world_size, per_machine=per_machine
        )

    def _open_mesh(self) -> DeviceMesh:
        shape = self._mesh_shape(self.world_size, len(self.parallel_devices))
        names = (SHARD,) if len(shape) == 1 else (REPLICATE, SHARD)
        if isinstance(self._requested_mesh, DeviceMesh):
            return self._requested_mesh
        return open_mesh(self.root_device.type, shape, names, self.timeout)

    def _sharding(self) -> Sharding:
        mesh, smaller = self.device_mesh, self._reshard_after_forward
        if not isinstance(smaller, bool) and mesh.shape[-1] % smaller:
            raise RequestError(
                f"reshard_after_forward {smaller} does not divide the {mesh.shape[-1]} ranks that parameters are "
                "sharded over: give a number that does, or True or False"
            )
        return self._sharding_over(
            mesh,
            reshard_after_forward=smaller,
            prefetches_backward=self._prefetches_backward,
            buffer_dtype=getattr(self._mixed_precision, "buffer_dtype", None),
        )

    def _blocks(self) -> list[Module]:
        return blocks_of(self.module, self._auto_wrap_policy)


DDPFullyShardedNativeStrategy = FSDPStrategy  # its name in Lightning before 2.0


def _reshards(value: bool | int | None, sharding: ShardingName | None) -> bool | int:
    if value is None:
        return sharding not in ("SHARD_GRAD_OP", "NO_SHARD")
    if value is False and sharding in ("FULL_SHARD", "HYBRID_SHARD"):
        raise ConflictError(
            f"sharding_strategy {sharding!r} frees blocks after their forward pass, and reshard_after_forward=False "
            "keeps them: leave one of them out"
        )
    if not isinstance(value, int) or (value is not False and value < 1):
        raise RequestError(f"reshard_after_forward {value!r} is not True, False or a number of ranks, such as 8")
    return value
