"""Partitions of an engine's weights, and the parameters of their elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat_deepspeed.nvme import GroupInFiles, group_in_files, held_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extent:
    """Elements of a parameter in a partition.

    Attributes:
        name: Of the parameter in the user's module.
        parameter: The parameter.
        shape: Of the whole parameter.
        start: Position of the first element in the flattened parameter.
        offset: Position of the first element in the partition.
        length: Number of elements; 0 where the partition has none of the parameter.
    """

    name: str
    parameter: Parameter
    shape: tuple[int, ...]
    start: int
    offset: int
    length: int

    @property
    def weights(self) -> Tensor:
        """The same elements of the parameter that the module computes with, as a view."""
        if hasattr(self.parameter, "ds_tensor"):
            return held_elements(self.parameter)[: self.length]
        return self.parameter.detach().view(-1)[self.start : self.start + self.length]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partition:
    """Elements of several parameters in one tensor, which the optimizer has in the place of these.

    Attributes:
        tensor: The tensor, which may be padded at its end.
        group: Index of the optimizer's group.
        extents: What is in it; every parameter of the group is in some partition of every rank.
        is_whole: Whether every rank has all elements.
        files: Where the elements are, and the state; None is memory.
    """

    tensor: Tensor
    group: int
    extents: tuple[Extent, ...]
    is_whole: bool = False
    files: GroupInFiles | None = None

    @property
    def weights(self) -> Tensor:
        """The elements."""
        return self.tensor if self.files is None else self.files.weights

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what the optimizer keeps of the elements; empty before its first step."""
        state: dict[str, Any] = (
            optimizer.state.get(self.tensor, {}) if self.files is None else self.files.state(optimizer)
        )
        return state

    def set_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Let the optimizer go on with a state."""
        if self.files is None:
            optimizer.state[self.tensor] = state
        else:
            self.files.set_state(optimizer, state)

    def part(self, like_weights: Tensor, extent: Extent) -> Tensor | FlatShard:
        """Return a parameter's elements, as a view of a tensor that is laid out as the weights are."""
        local = like_weights.detach().view(-1)[extent.offset : extent.offset + extent.length]
        if self.is_whole:
            return local.view(extent.shape)
        return FlatShard(local=local, start=extent.start, shape=extent.shape)


def partitions_of(optimizer: Any, names: Mapping[int, str]) -> list[Partition] | None:
    """Return this rank's partitions; None where the optimizer has the parameters themselves, as in stage 0.

    Args:
        optimizer: What DeepSpeed has made of the user's optimizer.
        names: Of the parameters, by id.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_of_stage_3(optimizer, names))
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return [
            Partition(tensor=flat, group=group, extents=tuple(_consecutive(pairs, flat.numel(), rank, names)))
            for group, (flat, pairs, rank) in enumerate(_of_stages_1_and_2(optimizer))
        ]
    if hasattr(optimizer, "fp32_groups_flat_partition"):
        return [
            Partition(tensor=flat, group=group, extents=tuple(_consecutive(pairs, flat.numel(), rank, names)))
            for group, (flat, pairs, rank) in enumerate(_of_bf16(optimizer))
        ]
    if hasattr(optimizer, "fp32_groups_flat"):
        return [
            Partition(tensor=flat, group=group, extents=tuple(_whole(parameters, names)), is_whole=True)
            for group, (flat, parameters) in enumerate(
                zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True)
            )
        ]
    if hasattr(optimizer, "fp32_groups"):
        return [
            Partition(tensor=copy, group=group, extents=tuple(_whole([parameter], names)), is_whole=True)
            for group, (copies, parameters) in enumerate(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True))
            for copy, parameter in zip(copies, parameters, strict=True)
        ]
    return None


def _whole(parameters: Iterable[Parameter], names: Mapping[int, str]) -> Iterator[Extent]:
    """Yield parameters that follow each other, all of them on every rank."""
    reached = 0
    for parameter in parameters:
        yield Extent(
            name=names[id(parameter)],
            parameter=parameter,
            shape=tuple(parameter.shape),
            start=0,
            offset=reached,
            length=parameter.numel(),
        )
        reached += parameter.numel()


def _of_stages_1_and_2(optimizer: Any) -> Iterator[tuple[Tensor, list[tuple[Parameter, int]], int]]:
    groups = zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for flat, parameters, offsets, process_group in groups:
        yield flat, list(zip(parameters, offsets, strict=True)), process_group.rank()


def _of_bf16(optimizer: Any) -> Iterator[tuple[Tensor, list[tuple[Parameter, int]], int]]:
    groups = zip(
        optimizer.fp32_groups_flat_partition, optimizer.bf16_groups, optimizer.real_dp_process_group, strict=True
    )
    for flat, parameters, process_group in groups:
        pairs, reached = [], 0
        for parameter in parameters:
            pairs.append((parameter, reached))
            reached += parameter.numel()
        yield flat, pairs, process_group.rank()


def _consecutive(
    parameters: Iterable[tuple[Parameter, int]], size: int, rank: int, names: Mapping[int, str]
) -> Iterator[Extent]:
    """Yield what a rank has of parameters that follow each other, of which each rank has as many elements."""
    for parameter, offset in parameters:
        low = min(max(rank * size, offset), offset + parameter.numel())
        high = max(low, min((rank + 1) * size, offset + parameter.numel()))
        yield Extent(
            name=names[id(parameter)],
            parameter=parameter,
            shape=tuple(parameter.shape),
            start=low - offset,
            offset=low - rank * size if high > low else 0,
            length=high - low,
        )


def _of_stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Partition]:
    for number, (flat, parameters) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    ):
        extents, reached = [], 0
        for parameter in parameters:
            shard = shard_of_stage_3(parameter)
            extents.append(
                Extent(
                    name=names[id(parameter)],
                    parameter=parameter,
                    shape=shard.shape,
                    start=shard.start,
                    offset=reached,
                    length=shard.local.numel(),
                )
            )
            reached += parameter.partition_numel()
        yield Partition(
            tensor=flat,
            group=optimizer.sub_group_to_group_id[number],
            extents=tuple(extents),
            files=group_in_files(optimizer, number),
        )


def shard_of_stage_3(parameter: Any) -> FlatShard:
    """Return what this rank holds of a parameter that stage 3 has split, without the padding."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(parameter.ds_process_group.rank() * size, numel)
    local = held_elements(parameter)[: min(size, numel - start)]
    return FlatShard(local=local, start=start, shape=tuple(parameter.ds_shape))
