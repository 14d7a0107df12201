"""Partitions of an engine's weights, and the extents of parameters in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat_deepspeed.nvme import GroupInFiles, group_in_files, shard_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extent:
    """Consecutive elements of a parameter in a partition.

    Attributes:
        name: Name of the parameter in the user's module.
        parameter: The parameter.
        shape: Shape of the full parameter.
        start: Position of the first element in the flattened parameter.
        offset: Position of the first element in the partition.
        length: Number of elements; 0 if the partition has none of the parameter.
    """

    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    start: int
    offset: int
    length: int

    @property
    def weights(self) -> Tensor:
        """A view of these elements of the module's parameter."""
        if hasattr(self.parameter, "ds_tensor"):
            return shard_elements(self.parameter)[: self.length]
        return self.parameter.detach().view(-1)[self.start : self.start + self.length]

    def of(self, partition: Tensor) -> Tensor:
        """Return a view of the elements in a tensor with the partition's layout."""
        return partition.detach().view(-1)[self.offset : self.offset + self.length]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Elements of several parameters in one flat tensor, which the optimizer steps in place of the parameters.

    Attributes:
        tensor: The tensor, possibly padded at its end.
        group: Index of the optimizer's group.
        extents: The parameters' elements in it; each rank has an extent, even if empty, of each parameter of the group.
        is_replicated: Whether every rank has all elements.
        files: The files of the elements and their state; None if they are in memory.
    """

    tensor: Tensor
    group: int
    extents: tuple[Extent, ...]
    is_replicated: bool = False
    files: GroupInFiles | None = None

    @property
    def weights(self) -> Tensor:
        """The elements."""
        return self.tensor if self.files is None else self.files.weights

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state of the partition; empty before its first step."""
        if self.files is not None:
            return self.files.state(optimizer)
        state: dict[str, Any] = optimizer.state.get(self.tensor, {})
        return state

    def set_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Set the optimizer's state of the partition."""
        if self.files is None:
            optimizer.state[self.tensor] = state
        else:
            self.files.set_state(optimizer, state)

    def shard(self, like_weights: Tensor, extent: Extent) -> Tensor | FlatShard:
        """Return a view of a parameter's elements in a tensor with the layout of the weights."""
        local = extent.of(like_weights)
        if self.is_replicated:
            return local.view(extent.shape)
        return FlatShard(local=local, start=extent.start, shape=extent.shape)


def partitions_of(optimizer: Any, names: Mapping[int, str]) -> list[Partition] | None:
    """Return this rank's partitions; None if the optimizer has the parameters themselves, as in stage 0.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
        names: Names of the parameters, by ``id``.
    """
    # Each wrapper of DeepSpeed has its own attributes, by which it is recognized.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        return list(_of_stage_3(optimizer, names))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):  # stages 1 and 2
        groups = zip(
            optimizer.single_partition_of_fp32_groups,
            optimizer.round_robin_bit16_groups,
            optimizer.round_robin_bit16_offsets,
            optimizer.real_dp_process_group,
            strict=True,
        )
        return [
            Partition(
                tensor=flat,
                group=group,
                extents=_extents_of_rank(parameters, offsets, flat.numel(), ranks.rank(), names),
            )
            for group, (flat, parameters, offsets, ranks) in enumerate(groups)
        ]
    if hasattr(optimizer, "fp32_groups_flat_partition"):  # stage 1 with weights of 16 bits and gradients of 32
        flats = zip(
            optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, optimizer.real_dp_process_group, strict=True
        )
        return [
            Partition(
                tensor=flat,
                group=group,
                extents=_extents_of_rank(parameters, _offsets(parameters), flat.numel(), ranks.rank(), names),
            )
            for group, (flat, parameters, ranks) in enumerate(flats)
        ]
    if hasattr(optimizer, "fp32_groups_flat"):  # stage 0 in 16 bits, with an optimizer of DeepSpeed's
        replicas = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
        return [
            Partition(tensor=flat, group=group, extents=_all_extents(parameters, names), is_replicated=True)
            for group, (flat, parameters) in enumerate(replicas)
        ]
    if hasattr(optimizer, "fp32_groups"):  # stage 0 in 16 bits
        return [
            Partition(tensor=copy, group=group, extents=_all_extents([parameter], names), is_replicated=True)
            for group, (copies, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True))
            for copy, parameter in zip(copies, parameters, strict=True)
        ]
    return None


def _offsets(parameters: Iterable[Parameter]) -> list[int]:
    """Return the positions of consecutive parameters in a flat tensor."""
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += parameter.numel()
    return offsets


def _all_extents(parameters: list[Parameter], names: Mapping[int, str]) -> tuple[Extent, ...]:
    """Return the extents of consecutive parameters in a replicated partition."""
    return _extents_of_rank(
        parameters, _offsets(parameters), sum(parameter.numel() for parameter in parameters), 0, names
    )


def _extents_of_rank(
    parameters: Iterable[Parameter], offsets: Iterable[int], size: int, rank: int, names: Mapping[int, str]
) -> tuple[Extent, ...]:
    """Return the extents of a rank's partition of a flat tensor.

    Args:
        parameters: In the flat tensor.
        offsets: Their positions in it.
        size: Elements of each rank's partition.
        rank: Of the partition.
        names: Names of the parameters, by ``id``.
    """
    extents = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        low = min(max(rank * size, offset), offset + parameter.numel())
        high = max(low, min((rank + 1) * size, offset + parameter.numel()))
        extents.append(
            Extent(
                name=names[id(parameter)],
                parameter=parameter,
                shape=tuple(parameter.shape),
                start=low - offset,
                offset=low - rank * size if high > low else 0,
                length=high - low,
            )
        )
    return tuple(extents)


def _of_stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Partition]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for number, (flat, parameters) in enumerate(groups):
        extents, offset = [], 0
        for parameter in parameters:
            shard = shard_of_stage_3(parameter)
            extents.append(
                Extent(
                    name=names[id(parameter)],
                    parameter=parameter,
                    shape=shard.shape,
                    start=shard.start,
                    offset=offset,
                    length=shard.local.numel(),
                )
            )
            offset += parameter.partition_numel()
        yield Partition(
            tensor=flat,
            group=optimizer.sub_group_to_group_id[number],
            extents=tuple(extents),
            files=group_in_files(optimizer, number),
        )


def shard_of_stage_3(parameter: Any) -> FlatShard:
    """Return this rank's shard of a parameter of stage 3, without the padding."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(parameter.ds_process_group.rank() * size, numel)
    local = shard_elements(parameter)[: min(size, numel - start)]
    return FlatShard(local=local, start=start, shape=tuple(parameter.ds_shape))
