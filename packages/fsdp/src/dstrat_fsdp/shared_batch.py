"""Base of sharded strategies in which several ranks share each batch."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat.parallel.collectives import broadcast_tensors, name_of_operation
from dstrat_fsdp.sharded_strategy import ShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh


class SharedBatchStrategy(ShardedStrategy):
    """A sharded strategy whose ranks form groups that read the same batch, such as those of tensor parallelism.

    Neighbouring ranks are the group of tensor parallelism; next come the groups that read different batches.
    """

    # Hooks of subclasses

    @property
    @abstractmethod
    def data_parallel_size(self) -> int:
        """Number of groups of ranks that read different batches."""

    @property
    @abstractmethod
    def tensor_parallel_size(self) -> int:
        """Number of ranks over which layers are split."""

    @property
    @abstractmethod
    def _tensor_mesh(self) -> DeviceMesh:
        """The ranks over which layers are split."""

    @abstractmethod
    def _value_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the groups over which first values are broadcast one after the other, besides tensor parallelism."""

    @abstractmethod
    def _data_groups(self) -> Sequence[dist.ProcessGroup]:
        """Return the groups of ranks that read different batches, one for each dimension of the mesh."""

    @property
    def _num_data_groups(self) -> int:
        """Number of groups of ranks that compute with different data: other batches, or other parts of a batch."""
        return self.data_parallel_size

    # Data

    @property
    def _data_group(self) -> int:
        return self.global_rank // self.tensor_parallel_size % self._num_data_groups

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """``num_replicas`` and ``rank`` of this rank's group, all ranks of which read the same data."""
        share = self._data_group * self.data_parallel_size // self._num_data_groups
        return {"num_replicas": self.data_parallel_size, "rank": share}

    @property
    def is_first_reader(self) -> bool:
        """Whether this rank is the first of its group, all of which compute with the same data."""
        return self.global_rank == self._data_group * self.tensor_parallel_size

    # Layers that are split

    def _check_split(self, advice: str) -> None:
        """Raise MisuseError if ranks share a batch to split layers, and none is split."""
        split = any(isinstance(parameter, DTensor) for parameter in self.module.parameters())
        if self.tensor_parallel_size > 1 and not split:
            raise MisuseError(
                f"no layer of {type(self.module).__name__} is split over the {self.tensor_parallel_size} ranks of "
                f"{advice}"
            )

    def _take_first_shards(self, split: Sequence[DTensor]) -> None:
        shards = [tensor.to_local() for tensor in split if tensor.device_mesh == self._tensor_mesh]
        for group in self._value_groups():
            broadcast_tensors(shards, group)

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
            for data_group in self._data_groups():
                tensor = super().reduce(tensor, group=data_group, reduce_op=reduce_op)
            return tensor
        reduced = super().reduce(tensor, group=group, reduce_op=reduce_op)
        if group is None and name in ("sum", "premul_sum") and reduced is not tensor:
            exact = None if reduced.is_floating_point() else "trunc"
            return torch.div(reduced, self.world_size // self._num_data_groups, rounding_mode=exact)
        return reduced

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - the known name
        # The base class compares a sum of votes with the world size, and reduce counts ranks that share a batch once.
        vote = torch.tensor(float(decision), device=self.root_device)
        return bool(super().reduce(vote, reduce_op="min" if all else "max"))
