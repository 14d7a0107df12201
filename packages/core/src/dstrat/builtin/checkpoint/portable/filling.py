"""Reading tensors of a checkpoint into memory: whole, or only what this process holds of them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dstrat.builtin.checkpoint.portable.dtypes import dtype_named
from dstrat.builtin.checkpoint.portable.layout import BLOCK, BUCKET
from dstrat.builtin.checkpoint.portable.parallel import map_in_threads
from dstrat.builtin.checkpoint.portable.payload import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from dstrat.builtin.checkpoint.portable.index import Piece, TensorEntry
    from dstrat.builtin.checkpoint.portable.opened_folder import OpenedFolder
    from dstrat.builtin.checkpoint.portable.parts import Part


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Read:
    """Some rows of a piece, and where they go.

    Attributes:
        file: Name of the file.
        begin: Position of the first byte.
        dtype: Of what is stored there; the target's may be another.
        shape: Likewise.
        box: What of it is wanted, one slice per dimension.
        target: Where that goes, of the box's shape.
    """

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    target: Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read to where they belong."""
        target = self.target
        same = target.numel() == math.prod(self.shape) and target.dtype == self.dtype
        return same and target.is_contiguous() and target.is_cpu


def fill(
    folder: OpenedFolder,
    wanted: Iterable[tuple[TensorEntry, Sequence[Part]]],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read parts of tensors into the memory that the parts refer to.

    Args:
        folder: The checkpoint.
        wanted: Tensors of the checkpoint, each with the parts that this process holds of it.
        advance: Is told how many bytes more were read, in any thread.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    reads = [read for entry, parts in wanted for part in parts for read in _reads(entry, part)]
    for name in sorted({read.file for read in reads}):
        folder.file(name)
    map_in_threads(lambda batch: _read_all(folder, batch, advance), list(_batches(reads)))


def _batches(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Yield reads that are near each other, so that small tensors do not cost a task each."""
    batch: list[_Read] = []
    size = 0
    for read in sorted(reads, key=lambda read: (read.file, read.begin)):
        batch.append(read)
        size += read.target.nbytes
        if size >= BUCKET:
            yield batch
            batch, size = [], 0
    yield batch


def _read_all(folder: OpenedFolder, batch: list[_Read], advance: Callable[[int], None] | None) -> None:
    for read in batch:
        if read.is_direct:
            folder.file(read.file).read_into(as_bytes(read.target).numpy().data, read.begin)
        else:
            stored = torch.empty(read.shape, dtype=read.dtype)
            folder.file(read.file).read_into(as_bytes(stored).numpy().data, read.begin)
            read.target.copy_(stored[read.box])
        if advance is not None:
            advance(read.target.nbytes)


def _reads(entry: TensorEntry, part: Part) -> Iterator[_Read]:
    """Yield what to read for a part, from each piece that overlaps it."""
    target = part.tensor if part.tensor.dim() else part.tensor.reshape(1)
    starts, dtype = part.starts or (0,), dtype_named(entry.dtype)
    for piece in entry.pieces:
        first, shape = piece.starts or (0,), piece.shape or (1,)
        low = tuple(map(max, starts, first))
        high = tuple(
            min(start + size, other + count)
            for start, size, other, count in zip(starts, target.shape, first, shape, strict=True)
        )
        if all(begin < end for begin, end in zip(low, high, strict=True)):
            within = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, starts, strict=True))
            box = tuple(slice(a - start, b - start) for a, b, start in zip(low, high, first, strict=True))
            yield from _rows(piece, dtype, shape, box, target[within])


def _rows(
    piece: Piece, dtype: torch.dtype, shape: tuple[int, ...], box: tuple[slice, ...], target: Tensor
) -> Iterator[_Read]:
    """Yield reads of whole rows: rows of at most a block where that is possible, at most a bucket of them at once."""
    strides = [math.prod(shape[dimension + 1 :]) * dtype.itemsize for dimension in range(len(shape))]
    split = next(
        dimension for dimension, stride in enumerate(strides) if stride <= BLOCK or dimension == len(shape) - 1
    )
    step = max(1, BUCKET // strides[split])
    for outer in itertools.product(*(range(cut.start, cut.stop) for cut in box[:split])):
        inner = target[tuple(index - cut.start for index, cut in zip(outer, box[:split], strict=True))]
        for first in range(box[split].start, box[split].stop, step):
            count = min(step, box[split].stop - first)
            begin = sum(index * stride for index, stride in zip((*outer, first), strides, strict=False))
            yield _Read(
                file=piece.file,
                begin=piece.begin + begin,
                dtype=dtype,
                shape=(count, *shape[split + 1 :]),
                box=(slice(0, count), *box[split + 1 :]),
                target=inner[first - box[split].start :][:count],
            )


def empty_tensor(entry: TensorEntry) -> Tensor:
    """Return memory for a whole tensor on the CPU."""
    return torch.empty(entry.shape, dtype=dtype_named(entry.dtype))
