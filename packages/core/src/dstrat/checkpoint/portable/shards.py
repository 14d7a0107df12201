"""Local boxes of tensors: the elements that this process holds, and their bytes."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


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
    return sharded


def check_kind(tensor: Tensor | FlatShard, name: str) -> None:
    """Raise a :class:`CheckpointError` for a tensor that cannot be saved: sparse, quantized, on meta ..."""
    if isinstance(tensor, FlatShard):
        tensor = tensor.local
    kind = type(tensor)
    reason = None
    # A subclass has contents that its elements do not show; it would come back as a plain tensor.
    if kind not in (Tensor, torch.nn.Parameter) and not is_distributed(tensor):
        reason = f"is a {kind.__module__}.{kind.__qualname__}"
    elif tensor.layout != torch.strided:
        reason = f"has the layout {tensor.layout}"
    elif tensor.is_meta:
        reason = "is on the device meta, so it has no values"
    elif tensor.is_quantized:
        reason = "is quantized"
    elif tensor.is_nested:
        reason = "is nested"
    if reason:
        raise CheckpointError(f"tensor {name!r} {reason}: a checkpoint holds dense tensors and DTensors only")


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
    for placement, position, count in zip(tensor.placements, coordinate, tensor.device_mesh.mesh.shape, strict=True):
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
    index = tuple(
        slice(None) if placement.is_replicate() else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    ranks: list[int] = tensor.device_mesh.mesh[index].flatten().tolist()
    return ranks


# Bytes of a box, on any device, bucket by bucket


class Payload:
    """A box of a tensor to be written.

    Bytes on the CPU are not copied; those of an accelerator are copied one bucket at a time.  A box that is not
    contiguous is copied completely on the first read, and the copy is freed after the last.

    Args:
        name: Name of the tensor.
        box: The box.
    """

    def __init__(self, name: str, box: LocalBox) -> None:
        self.name = name
        self.starts = box.starts
        self.shape = tuple(box.tensor.shape)
        self.dtype = box.tensor.dtype
        self.num_bytes = box.tensor.numel() * box.tensor.element_size()
        self.tensor = box.tensor
        self._copy: Tensor | None = None
        self._remaining = self.num_bytes
        self._lock = threading.Lock()

    def view(self, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end``; each byte is read once."""
        if self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg():
            data = as_bytes(self.tensor)[begin:end]
        else:
            with self._lock:  # threads read different buckets of one box
                if self._copy is None:
                    self._copy = as_bytes(self.tensor.resolve_conj().resolve_neg().contiguous())
                data = self._copy[begin:end]
                self._remaining -= end - begin
                if self._remaining == 0:
                    self._copy = None
        if not data.is_cpu:
            data = host_memory(data.numel(), pins=True).copy_(data)
        return data.numpy().data


def host_memory(num_bytes: int, *, pins: bool) -> Tensor:
    """Return uninitialized bytes on the CPU, pinned where that is possible: a device copies to these much faster."""
    if pins:
        # A device may have no pinned memory, and the system limits how much there is.
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8)


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Wait for everything that is queued on all streams of devices; nothing is queued on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:  # copies of others are never non-blocking
            torch.accelerator.synchronize(device)


def memory_key(tensor: Tensor) -> Any:
    """Return a value that is equal for two dense tensors if they are the same elements of the same memory."""
    # Tensors of some backends have the address 0, which would make all tensors of one shape equal.
    address = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())  # noqa: SLF001 - no other id
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.dtype, tensor.device, address, view


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat tensor of uint8."""
    flat = tensor.detach().reshape(-1)
    # view needs a last stride of 1, and a tensor of one element may have any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)
