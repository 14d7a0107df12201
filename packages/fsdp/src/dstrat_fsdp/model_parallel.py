"""Training with layers that are split over several ranks, which share a batch, and shards over groups of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat.parallel.collectives import broadcast_tensors, name_of_operation
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat_fsdp.memory import sharded_layout
from dstrat_fsdp.mesh import DATA_PARALLEL, TENSOR_PARALLEL, open_mesh, parallel_sizes
from dstrat_fsdp.options import offload_policy, precision_policy, state_dict_type_name
from dstrat_fsdp.sharded_module import Sharding
from dstrat_fsdp.sharded_strategy import ShardedStrategy
from dstrat_fsdp.wrap_policy import ActivationCheckpointing, blocks_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.precision import Precision


class ModelParallelStrategy(ShardedStrategy):
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
        self._checkpointing = ActivationCheckpointing(None, None)
        self._state_dict_type = state_dict_type_name(state_dict_type)

    # The mesh

    @property
    def _sizes(self) -> tuple[int, int]:
        data, tensor = self._requested_sizes
        return parallel_sizes(data, tensor, world_size=self.world_size, per_machine=len(self.parallel_devices))

    @property
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""
        return self._sizes[0]

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share a batch."""
        return self._sizes[1]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` of this rank's group, all ranks of which read the same data."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self.tensor_parallel_size}

    @property
    def is_first_reader(self) -> bool:
        """Whether this rank is the first of its group, all of which read the same data."""
        return self.global_rank % self.tensor_parallel_size == 0

    def memory_layout(self, training: TrainingSize) -> MemoryLayout | None:
        """Return the memory of a rank if each matrix is split over the ranks that share a batch.

        Which layers are split is decided in ``configure_model``, in the ranks.  Activations are those of one device:
        the most, since split layers divide theirs too.
        """
        data, tensor = parallel_sizes(
            *self._requested_sizes, world_size=training.world_size, per_machine=training.ranks_per_machine
        )
        layout = sharded_layout(
            training,
            blocks_of(training.module, None),
            num_shards=data,
            num_splits=tensor,
            policy=precision_policy(None, training.precision),
            frees_blocks=True,
            offloads=False,
        )
        if tensor == 1:
            return layout
        assumption = f"configure_model splits each weight matrix over {tensor} ranks; activations not split"
        return dataclasses.replace(layout, assumption=assumption)

    def _open_mesh(self) -> DeviceMesh:
        return open_mesh(self.root_device.type, self._sizes, (DATA_PARALLEL, TENSOR_PARALLEL), self.timeout)

    # Sharding

    def _sharding(self) -> Sharding:
        return Sharding(
            mesh=self.device_mesh[DATA_PARALLEL],
            reshard_after_forward=True,
            precision_policy=precision_policy(None, self.precision_plugin),
            offload_policy=offload_policy(None, self.root_device),
            sums_gradients=not self.accelerator.averages_in_collectives,
        )

    def _blocks(self) -> list[Module]:
        split = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if self.tensor_parallel_size > 1 and not split:
            raise MisuseError(
                f"no layer of {type(self.module).__name__} is split over the {self.tensor_parallel_size} ranks of "
                'tensor_parallel_size: call parallelize_module(..., self.device_mesh["tensor_parallel"], ...) in '
                "configure_model, or use the strategy 'fsdp'"
            )
        return blocks_of(self.module, None)

    def _take_first_shards(self, split: Sequence[DTensor]) -> None:
        groups = self.device_mesh[DATA_PARALLEL]
        shards = [tensor.to_local() for tensor in split if tensor.device_mesh == self.device_mesh[TENSOR_PARALLEL]]
        broadcast_tensors(shards, groups.get_group())

    @property
    def _is_reusable(self) -> bool:
        return False  # tensor-parallel layers hold the mesh of their run

    # Communication

    def reduce(
        self, tensor: Any, group: dist.ProcessGroup | None = None, reduce_op: str | dist.ReduceOp | None = "mean"
    ) -> Any:
        """Return the tensor reduced over all batches; ranks that share a batch count once."""
        name = name_of_operation(reduce_op)
        # Over all ranks, each batch counts once for each rank that shares it.  That changes no mean and no maximum, a
        # division corrects a sum, and nothing corrects a product.
        if group is None and name in ("product", "bxor"):
            group = self.device_mesh[DATA_PARALLEL].get_group()
        reduced = super().reduce(tensor, group=group, reduce_op=reduce_op)
        if group is None and name in ("sum", "premul_sum") and reduced is not tensor:
            exact = None if reduced.is_floating_point() else "trunc"
            return torch.div(reduced, self.tensor_parallel_size, rounding_mode=exact)
        return reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - the known name
        # The base class compares a sum of votes with the world size, and reduce counts ranks that share a batch once.
        vote = torch.tensor(float(decision), device=self.root_device)
        return bool(super().reduce(vote, reduce_op="min" if all else "max"))
