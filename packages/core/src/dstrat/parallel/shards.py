"""Local boxes of tensors: the elements that this process holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


Run = tuple[int, int]
"""Consecutive indices of a dimension: the first one, and their number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalBox:
    """A box of a tensor in this process's memory.

    Attributes:
        tensor: The elements, as a view of the memory, of the box's shape.
        starts: Index of the first element in the full tensor, one number per dimension.
    """

    tensor: Tensor
    starts: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the full tensor, a slice per dimension."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.tensor.shape, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Position and shape of a box in the full tensor, one number per dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of its elements."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorOutline:
    """Shape and dtype of a tensor, which the other ranks need to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def is_distributed(tensor: Tensor | FlatShard) -> bool:
    """Return whether the tensor is a ``DTensor``."""
    # By its attributes: importing torch.distributed.tensor takes half a second, also for a save on one device.
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def is_sharded(tensor: Tensor | FlatShard) -> bool:
    """Return whether the tensor is a ``DTensor`` or a :class:`FlatShard`."""
    return isinstance(tensor, FlatShard) or is_distributed(tensor)


def local_tensor(tensor: Tensor | FlatShard) -> Tensor:
    """Return the elements that this process holds, in the same memory."""
    if isinstance(tensor, FlatShard):
        return tensor.local
    distributed: Any = tensor
    with torch.no_grad():
        local: Tensor = distributed.to_local() if is_distributed(tensor) else tensor
    return local.detach()


def full_value(value: Any) -> Any:
    """Return the full tensor of a ``DTensor``, which is collective over its mesh, and any other value as it is."""
    if not is_distributed(value):
        return value
    from dstrat.parallel.full_state import full_tensor  # which imports torch.distributed.tensor

    return full_tensor(value)


def with_local(like: Tensor | FlatShard, local: Tensor) -> Tensor | FlatShard:
    """Return a tensor that is sharded like another, of this process's elements."""
    if isinstance(like, FlatShard):
        return FlatShard(local=local, start=like.start, shape=like.shape)
    if not is_distributed(like):
        return local
    from torch.distributed.tensor import DTensor

    distributed: Any = like
    sharded: Tensor = DTensor.from_local(
        local,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,  # it would communicate; shape and stride are needed as shards may differ in size
        shape=like.shape,
        stride=like.stride(),
    )
    return sharded.to(local.device)  # from_local has moved it to the mesh's device


def local_boxes(tensor: Tensor | FlatShard, name: str = "") -> list[LocalBox]:
    """Return the boxes of a tensor that this process holds, without empty ones.

    Raises:
        CheckpointError: The tensor is a DTensor with partial sums, or its local shape contradicts its placements.
    """
    if isinstance(tensor, FlatShard):
        return _flat_boxes(tensor)
    if not is_distributed(tensor):
        return [LocalBox(tensor=tensor.detach(), starts=(0,) * tensor.dim())] if tensor.numel() else []
    distributed: Any = tensor
    with torch.no_grad():
        local: Tensor = distributed.to_local()
    coordinate = distributed.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return []
    runs = _runs(distributed, coordinate, name)
    # The placements say where the elements belong; wrong ones would save them in wrong positions.
    if tuple(local.shape) != tuple(sum(size for _, size in dimension) for dimension in runs):
        raise CheckpointError(
            f"tensor {name!r} has a local shape of {tuple(local.shape)}, which does not follow from the placements "
            f"{distributed.placements} of a shape of {tuple(tensor.shape)}: only DTensors made by torch can be saved"
        )
    return _boxes(local.detach(), runs)


def boxes_at(tensor: Any, coordinate: Sequence[int]) -> list[Extent]:
    """Return the boxes of a DTensor that the rank at a coordinate of its mesh has, in the order of its local boxes."""
    runs = _runs(tensor, coordinate, "")
    return [
        Extent(starts=tuple(start for start, _ in box), sizes=tuple(size for _, size in box))
        for box in itertools.product(*runs)
        if all(size for _, size in box)
    ]


def _flat_boxes(shard: FlatShard) -> list[LocalBox]:
    """Return the boxes of a run of flattened elements: incomplete rows at both ends, complete rows between them."""
    boxes, passed, local = [], 0, shard.local.detach()
    for starts, sizes in _flat_extents(shard.shape, shard.start, shard.start + local.numel()):
        size = math.prod(sizes)
        boxes.append(LocalBox(tensor=local[passed : passed + size].view(sizes), starts=starts))
        passed += size
    return boxes


def _flat_extents(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and shape of the boxes that the flattened elements ``begin`` to ``end`` fill, in order."""
    if begin == end:
        return
    if len(shape) < 2:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    if begin % row or end - begin < row:  # an incomplete row: boxes of one dimension less
        stop = min(end, (begin // row + 1) * row)
        for starts, sizes in _flat_extents(shape[1:], begin % row, begin % row + stop - begin):
            yield (begin // row, *starts), (1, *sizes)
    else:
        stop = begin + (end - begin) // row * row
        yield (begin // row, *(0,) * (len(shape) - 1)), ((stop - begin) // row, *shape[1:])
    yield from _flat_extents(shape, stop, end)


def _boxes(local: Tensor, runs: Sequence[Sequence[Run]]) -> list[LocalBox]:
    """Return a view of the local tensor for each combination of the dimensions' runs."""
    if local.numel() == 0:
        return []
    offsets = [[0, *itertools.accumulate(size for _, size in dimension)] for dimension in runs]
    boxes = []
    for combination in itertools.product(*(range(len(dimension)) for dimension in runs)):
        view = local
        for dimension, position in enumerate(combination):
            view = view.narrow(dimension, offsets[dimension][position], runs[dimension][position][1])
        starts = tuple(runs[dimension][position][0] for dimension, position in enumerate(combination))
        boxes.append(LocalBox(tensor=view, starts=starts))
    return boxes


def _runs(tensor: Any, coordinate: Sequence[int], name: str) -> list[list[Run]]:
    """Return this process's indices in each dimension."""
    runs: list[list[Run]] = [[(0, size)] for size in tensor.shape]
    for placement, position, count in zip(tensor.placements, coordinate, tensor.device_mesh.shape, strict=True):
        if placement.is_replicate():
            continue
        dimension = getattr(placement, "dim", None)
        if dimension is None or placement.is_partial():
            raise CheckpointError(
                f"tensor {name!r} has the placement {placement}, so no process holds its values: "
                "redistribute it to Shard or Replicate before saving"
            )
        factor = int(getattr(placement, "split_factor", 1))
        runs[dimension] = _shard(runs[dimension], position, count, factor)
    return runs


def _shard(runs: Sequence[Run], position: int, count: int, factor: int) -> list[Run]:
    """Return one of ``count`` shards of the indices, with the sizes of ``torch.chunk``.

    With a factor (``_StridedShard``, for two mesh dimensions that shard one tensor dimension) the indices are cut into
    that many chunks first, and each chunk is sharded.
    """
    total = sum(size for _, size in runs)
    chunk = max(1, -(-total // factor))  # torch.chunk rounds up, so that later chunks may be smaller or missing
    selected: list[Run] = []
    for begin in range(0, total, chunk):
        end = min(total, begin + chunk)
        step = -(-(end - begin) // count)
        selected += _slice(runs, min(end, begin + position * step), min(end, begin + (position + 1) * step))
    return _merged(selected)


def _slice(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """Return the indices from ``begin`` to ``end`` of the sequence of all indices."""
    selected, passed = [], 0
    for start, size in runs:
        low, high = max(begin, passed), min(end, passed + size)
        if low < high:
            selected.append((start + low - passed, high - low))
        passed += size
    return selected


def _merged(runs: Sequence[Run]) -> list[Run]:
    # Fewer runs are fewer boxes: their number is multiplied over the dimensions.
    merged: list[Run] = []
    for start, size in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged


def holders(tensor: Any) -> list[int]:
    """Return the ranks, including this one, that hold the same boxes of a DTensor as this process."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    if not any(placement.is_replicate() for placement in tensor.placements):
        return [tensor.device_mesh.get_rank()]  # without the mesh's tensor, which torch 2.13 computes in each access
    index = tuple(
        slice(None) if placement.is_replicate() else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    ranks: list[int] = tensor.device_mesh.mesh[index].flatten().tolist()
    return ranks
