"""Training with layers that are split over several ranks, which share a batch, and shards over groups of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.interfaces.communication import CommunicationLayout
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_fsdp.communication import (
    copied_bytes,
    python_hooks,
    sharded_collectives,
    split_activation_share,
    split_collectives,
)
from dstrat_fsdp.memory import (
    MATRICES_SPLIT,
    Division,
    Divisions,
    ShardedTraining,
    estimated_blocks,
    sharded_layout,
)
from dstrat_fsdp.mesh import DATA_PARALLEL, TENSOR_PARALLEL, open_mesh, parallel_sizes
from dstrat_fsdp.options import precision_policy, state_dict_type_name
from dstrat_fsdp.shared_batch import SharedBatchStrategy, check_splits_layers
from dstrat_fsdp.wrap_policy import blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import StepName
    from dstrat_fsdp.sharded_module import Sharding


class ModelParallelStrategy(SharedBatchStrategy):
    """Tensor parallelism together with fully sharded data parallelism, on a mesh of two dimensions.

    The module splits its layers in ``configure_model``, where ``device_mesh["tensor_parallel"]`` is the group of ranks
    that share a batch::

        def configure_model(self):
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    It may also shard its blocks over ``device_mesh["data_parallel"]``; all other parameters are sharded as by
    FSDPStrategy.

    Args:
        accelerator: The hardware.
        parallel_devices: The devices of this machine, one for each local rank.
        cluster_environment: The cluster that the job runs on.
        checkpoint_io: The format of checkpoints.
        process_group_backend: Backend of torch.distributed; None takes the accelerator's.
        timeout: How long a rank waits for the others before the job fails.
        start_method: ``"popen"`` (re-run the script), ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        data_parallel_size: Number of groups that read different batches; "auto" follows from the other size.
        tensor_parallel_size: Number of ranks of a group; "auto" follows from the other size, or is the number of
            devices of a machine if both are "auto".
        precision_plugin: The precision; parameters are gathered in the dtype that it computes in.
        state_dict_type: The parameters after a run: ``"sharded"``, or ``"full"`` on each rank.

    Raises:
        RequestError: An option has an impossible value.
    """

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        state_dict_type: str = "sharded",
        process_group_backend: str | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
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
        self._requested_sizes = (data_parallel_size, tensor_parallel_size)
        self._state_dict_type = state_dict_type_name(state_dict_type)

    # The mesh

    @property
    def _sizes(self) -> tuple[int, int]:
        return self._sizes_of(self.world_size, len(self.parallel_devices))

    def _sizes_of(self, world_size: int, per_machine: int) -> tuple[int, int]:
        return parallel_sizes(*self._requested_sizes, world_size=world_size, per_machine=per_machine)

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""
        return self._sizes[0]

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share a batch."""
        return self._sizes[1]

    def check_training(self, training: TrainingSize) -> None:
        super().check_training(training)
        _, tensor = self._sizes_of(training.world_size, training.ranks_per_machine)
        if tensor == 1:
            return
        check_splits_layers(training, "tensor_parallel_size", (DATA_PARALLEL, TENSOR_PARALLEL), tensor)
        for heads in training.heads:
            if heads % tensor:
                raise RequestError(
                    f"tensor_parallel_size={tensor} does not divide the {heads} heads of "
                    f"{type(training.module).__name__}: choose a smaller one"
                )

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        """Return the memory of a rank if each matrix is split over the ranks that share a batch.

        Which layers are split is decided in ``configure_model``, in the ranks.
        """
        sharded = self._estimated(training)
        layout, tensor = sharded_layout(sharded), sharded.divisions.usual.splits
        if tensor == 1:
            return layout
        share = split_activation_share(training, sharded.blocks, tensor)
        return dataclasses.replace(layout, activation_share=share, assumption=MATRICES_SPLIT.format(tensor))

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        sharded = self._estimated(training)
        of_shards, tensor = sharded_collectives(sharded), sharded.divisions.usual.splits
        return CommunicationLayout(
            collectives=(*of_shards, *split_collectives(training, sharded.blocks, tensor)),
            ranks_per_batch=tensor,
            weight_share=1 / tensor,
            activation_share=split_activation_share(training, sharded.blocks, tensor),
            copied=copied_bytes(of_shards),
            hooks=python_hooks(sharded),
            assumption="" if tensor == 1 else MATRICES_SPLIT.format(tensor),
        )

    def _estimated(self, training: TrainingSize) -> ShardedTraining:
        data, tensor = self._sizes_of(training.world_size, training.ranks_per_machine)
        return ShardedTraining(
            training=training,
            blocks=estimated_blocks(training.module, None),
            divisions=Divisions(Division(shards=data, splits=tensor)),
            policy=precision_policy(None, training.precision),
            frees_blocks=True,
        )

    def _open_mesh(self) -> DeviceMesh:
        return open_mesh(self.root_device.type, self._sizes, (DATA_PARALLEL, TENSOR_PARALLEL), self.timeout)

    # Sharding

    def _sharding(self) -> Sharding:
        tensor_mesh = self._tensor_mesh if self.tensor_parallel_size > 1 else None
        return self._sharding_over(self.device_mesh[DATA_PARALLEL], reshard_after_forward=True, tensor_mesh=tensor_mesh)

    def _blocks(self) -> list[Module]:
        self._check_split(
            'tensor_parallel_size: call parallelize_module(..., self.device_mesh["tensor_parallel"], ...) in '
            "configure_model, or use the strategy 'fsdp'"
        )
        return blocks_of(self.module, None)

    @property
    def _tensor_mesh(self) -> DeviceMesh:
        return self.device_mesh[TENSOR_PARALLEL]

    def _data_groups(self) -> list[dist.ProcessGroup]:
        return [self.device_mesh[DATA_PARALLEL].get_group()]

    _value_groups = _data_groups

    def _batch_groups(self) -> list[dist.ProcessGroup]:
        return [self._tensor_mesh.get_group()]

    # Steps

    def run_step(self, name: StepName, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            self.check_same_batch(name, (args, kwargs))
        return super().run_step(name, step, *args, **kwargs)
