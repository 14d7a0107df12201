"""MeshStrategy: replicas, shards and split layers on a mesh of devices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from dstrat.errors import RequestError
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_fsdp.memory import sharded_layout
from dstrat_fsdp.mesh import open_mesh
from dstrat_fsdp.options import input_dtype, offload_policy, precision_policy, state_dict_type_name
from dstrat_fsdp.sharded_module import Sharding
from dstrat_fsdp.shared_batch import SharedBatchStrategy
from dstrat_fsdp.wrap_policy import ActivationCheckpointing, blocks_of, checked_policy
from dstrat_mesh.axes import REPLICATE, SHARD, TENSOR, Axes, checked_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.nn import Module

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat_fsdp.wrap_policy import LayerClasses, LayerPolicy, WrapPolicy


class MeshStrategy(SharedBatchStrategy):
    """Training on a mesh of devices, whose axes are the kinds of parallelism.

    The names of the axes are those of torchtitan.  Parameters, gradients and optimizer state are sharded over
    ``dp_shard``, as by FSDPStrategy; ``dp_replicate`` has replicas of the shards; with ``tp`` the module splits its
    layers in ``configure_model``, where ``device_mesh["tp"]`` is the group of ranks that share a batch::

        def configure_model(self):
            mesh = self.device_mesh["tp"]
            parallelize_module(self.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        precision_plugin: The precision; parameters are gathered in the dtype that it computes in.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        dp_replicate: Number of replicas of the shards, which read different batches.
        dp_shard: Number of ranks over which a replica is sharded, which read different batches; "auto" is what the
            other axes leave of the processes.
        tp: Number of ranks over which layers are split, which read the same batch.
        cpu_offload: Whether shards and the optimizer's step are on the CPU; True, or torch's policy.
        mixed_precision: Torch's policy of dtypes; None takes that of the precision plugin.
        auto_wrap_policy: The blocks that are gathered together: classes of layers, a function of a module, or the least
            number of parameters; None takes the module's ``auto_wrap_policy``, if it has one, or else repeated layers.
        activation_checkpointing: A class of layers, or several, that keep no activations for the backward pass.
        activation_checkpointing_policy: As activation_checkpointing, or a function of a module.
        reshard_after_forward: Whether blocks are freed between their forward and backward passes.
        state_dict_type: The parameters after a run: ``"sharded"``, or ``"full"`` on each rank.

    Raises:
        RequestError: An option has an impossible value.
    """

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int | str = "auto",
        tp: int = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        cpu_offload: bool | CPUOffloadPolicy | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        activation_checkpointing: LayerClasses | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        reshard_after_forward: bool = True,
        state_dict_type: str = "sharded",
        start_method: str = "popen",
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
        self._dp_replicate = checked_size("dp_replicate", dp_replicate)
        self._dp_shard = checked_size("dp_shard", dp_shard, or_auto=True)
        self._tp: int = checked_size("tp", tp)
        if not isinstance(reshard_after_forward, bool):
            raise RequestError(f"reshard_after_forward={reshard_after_forward!r} is not True or False")
        self._cpu_offload = cpu_offload
        self._mixed_precision = mixed_precision
        self._auto_wrap_policy = checked_policy("auto_wrap_policy", auto_wrap_policy, or_size=True)
        self._checkpointing = ActivationCheckpointing(activation_checkpointing, activation_checkpointing_policy)
        self._reshard_after_forward = reshard_after_forward
        self._state_dict_type = state_dict_type_name(state_dict_type)

    # The mesh

    def describe_layout(self, world_size: int, ranks_per_machine: int) -> Sequence[tuple[str, str, str]]:  # noqa: ARG002 - all ranks are one mesh
        return self._axes_of(world_size).rows()

    def _axes_of(self, world_size: int) -> Axes:
        return Axes.of(world_size, pp=1, dp_replicate=self._dp_replicate, dp_shard=self._dp_shard, tp=self._tp)

    @property
    def axes(self) -> Axes:
        """The sizes of the mesh, in each rank."""
        return self._axes_of(self.world_size)

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""
        return self.axes.dp_replicate * self.axes.dp_shard

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which layers are split."""
        size: int = self._tp
        return size

    def setup_environment(self) -> None:
        if self._cpu_offload and self.process_group_backend is None and self.root_device.type != "cpu":
            # Gradients are on the CPU then, and their norms are reduced there, by gloo.
            self.process_group_backend = f"cpu:gloo,{self.root_device.type}:{self.accelerator.process_group_backend}"
        super().setup_environment()

    def _open_mesh(self) -> DeviceMesh:
        axes = self.axes
        return open_mesh(self.root_device.type, axes.shape, axes.names, self.timeout)

    @property
    def _tensor_mesh(self) -> DeviceMesh:
        return self.device_mesh[TENSOR]

    def _data_groups(self) -> list[dist.ProcessGroup]:
        return [self.device_mesh.get_group(name) for name in (REPLICATE, SHARD)]

    def _value_groups(self) -> list[dist.ProcessGroup]:
        return self._data_groups()

    # Sharding

    def _sharding(self) -> Sharding:
        # torch replicates over the first dimension of a mesh with two.
        names = (SHARD,) if self.axes.dp_replicate == 1 else (REPLICATE, SHARD)
        return Sharding(
            mesh=self.device_mesh[names],
            reshard_after_forward=self._reshard_after_forward,
            precision_policy=precision_policy(self._mixed_precision, self.precision_plugin),
            offload_policy=offload_policy(self._cpu_offload, self.root_device),
            input_dtype=input_dtype(self._mixed_precision, self.precision_plugin),
            sums_gradients=not self.accelerator.averages_in_collectives,
        )

    def _blocks(self) -> list[Module]:
        self._check_split(
            f'tp={self._tp}: call parallelize_module(..., self.device_mesh["tp"], ...) in configure_model, or leave '
            "tp out"
        )
        return blocks_of(self.module, self._auto_wrap_policy)

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        """Return the memory of a rank if each matrix is split over the ranks of ``tp``."""
        axes = self._axes_of(training.world_size)
        offload = offload_policy(self._cpu_offload, torch.device(training.device_type))
        layout = sharded_layout(
            training,
            blocks_of(training.module, self._auto_wrap_policy),
            num_shards=axes.dp_shard,
            num_splits=axes.tp,
            policy=precision_policy(self._mixed_precision, training.precision),
            frees_blocks=self._reshard_after_forward,
            offloads=isinstance(offload, CPUOffloadPolicy),
        )
        if axes.tp == 1:
            return layout
        assumption = f"configure_model splits each weight matrix over {axes.tp} ranks; activations not split"
        return dataclasses.replace(layout, assumption=assumption)
