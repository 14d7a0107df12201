"""Loading: nested values with full tensors, or into the tensors of a template."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from dstrat.checkpoint.portable.decode import SEPARATOR, decode, insert, name_of, split_name, without_tensors
from dstrat.checkpoint.portable.format import (
    BLOCK,
    BUCKET,
    INDEX,
    PER_RANK,
    STATE,
    damaged_error,
    dtype_name,
    dtype_named,
    rank_file,
)
from dstrat.checkpoint.portable.payload import as_bytes
from dstrat.checkpoint.portable.storage import map_in_threads
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors
from dstrat.parallel.shards import local_boxes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from dstrat.checkpoint.portable.index import Piece, TensorEntry
    from dstrat.checkpoint.portable.reader import CheckpointReader
    from dstrat.parallel.shards import LocalBox


_PER_RANK_PREFIX = name_of([PER_RANK, ""])


def load(
    reader: CheckpointReader, *, rank: int, world_size: int, advance: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return a checkpoint with full tensors on the CPU, and with this rank's values if the world size is the same.

    Args:
        reader: The checkpoint.
        rank: Of this process.
        world_size: Of this job.
        advance: Called with the bytes of each read, in any thread.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    index = reader.index()
    tensors = read_tensors(reader, _job_names(index), advance)
    checkpoint = _decoded(reader, STATE, tensors)
    return _with_rank_values(checkpoint, reader, index, rank=rank, world_size=world_size)


def load_into(reader: CheckpointReader, template: Mapping[str, Any], *, rank: int, world_size: int) -> dict[str, Any]:
    """Read into the tensors of a template, each process its shards, and return the checkpoint with them in it.

    Args:
        reader: The checkpoint.
        template: Nested dicts and lists with tensors, of any placements, under the names of the checkpoint's.  Other
            tensors of the checkpoint are returned in full, except those at or below a None of the template: these are
            neither read nor returned.
        rank: Of this process.
        world_size: Of this job.

    Raises:
        CheckpointError: The checkpoint is damaged, lacks a tensor of the template, or has it in another shape or dtype.
    """
    index = reader.index()
    targets, optional, skipped = _targets(template)
    targets = {name: tensor for name, tensor in targets.items() if name in index or name not in optional}
    # All of them before the first read: a checkpoint that does not fit leaves the template as it was.
    _check_fits(reader, index, targets, converted=optional)
    stored = {name: index[index[name].same_as or name] for name in targets}
    read_into(reader, [(stored[name], local_boxes(tensor, name)) for name, tensor in targets.items()])
    remaining = [
        name for name in _job_names(index) if name not in targets and not f"{name}{SEPARATOR}".startswith(skipped)
    ]
    tensors = {**read_tensors(reader, remaining), **targets}
    checkpoint = _decoded(reader, STATE, tensors, skips=bool(skipped))
    return _with_rank_values(checkpoint, reader, index, rank=rank, world_size=world_size)


def _job_names(index: Mapping[str, TensorEntry]) -> list[str]:
    """Return the names of the tensors that do not belong to one rank."""
    return [name for name in index if not name.startswith(_PER_RANK_PREFIX)]


def _targets(template: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], tuple[str, ...]]:
    """Return a template's tensors by name, the names of optional ones, and the prefixes of names that are skipped."""
    targets: dict[str, Any] = {}
    optional: set[str] = set()
    skipped = []
    pending: list[tuple[tuple[Any, ...], Any, bool]] = [((), template, False)]
    while pending:
        keys, value, is_optional = pending.pop()
        is_optional = is_optional or isinstance(value, OptionalTensors)
        if isinstance(value, (Tensor, FlatShard)):
            targets[name_of(keys)] = value
            if is_optional:
                optional.add(name_of(keys))
        elif value is None:
            skipped.append(name_of((*keys, "")))
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [((*keys, key), item, is_optional) for key, item in items]
    return targets, optional, tuple(skipped)


def _check_fits(
    reader: CheckpointReader, index: Mapping[str, TensorEntry], targets: Mapping[str, Any], *, converted: Container[str]
) -> None:
    """Raise a :class:`CheckpointError` unless a checkpoint has the tensors of a template in their shapes and dtypes.

    Args:
        reader: The checkpoint.
        index: Of the checkpoint.
        targets: The tensors of the template, by name.
        converted: Names of targets that may have another dtype; the values are converted.
    """
    missing = sorted(name for name in targets if name not in index)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"checkpoint {str(reader.path)!r} has no tensor {', '.join(missing[:5])}{more}")
    for name, tensor in targets.items():
        entry = index[name]
        fits = name in converted or entry.dtype == dtype_name(tensor.dtype)
        if not fits or entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"tensor {name!r} is {entry.dtype} of shape {entry.shape} in checkpoint {str(reader.path)!r}, and "
                f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)} here"
            )


def load_rank_values(reader: CheckpointReader, rank: int) -> Any:
    """Return the ``"per_rank"`` values of one rank of the job that saved the checkpoint.

    Raises:
        CheckpointError: The checkpoint is damaged, or was saved by fewer ranks.
    """
    if not 0 <= rank < reader.manifest.world_size:
        raise CheckpointError(
            f"checkpoint {str(reader.path)!r} was saved by {reader.manifest.world_size} ranks: it has no rank {rank}"
        )
    return _rank_values(reader, reader.index(), rank)


def _with_rank_values(
    checkpoint: dict[str, Any],
    reader: CheckpointReader,
    index: Mapping[str, TensorEntry],
    *,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    # With another number of ranks, no state of a rank is this rank's: load_rank reads any of them.
    if world_size == reader.manifest.world_size:
        checkpoint[PER_RANK] = _rank_values(reader, index, rank)
    return checkpoint


def _rank_values(reader: CheckpointReader, index: Mapping[str, TensorEntry], rank: int) -> Any:
    prefix = name_of([PER_RANK, rank, ""])
    tensors = read_tensors(reader, [name for name in index if name.startswith(prefix)])
    return _decoded(reader, rank_file(rank, "json"), tensors, below=prefix)


def read_tensors(
    reader: CheckpointReader, names: Iterable[str], advance: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Return full tensors by name; aliases are the same tensor.

    Args:
        reader: The checkpoint.
        names: Of tensors of the checkpoint.
        advance: Called with the bytes of each read, in any thread.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    index, names = reader.index(), list(names)
    stored: dict[str, Tensor] = {}
    for name in names:
        first = index[name].same_as or name  # which need not be among the names
        if first not in stored:
            stored[first] = _allocate(reader, first, index[first])
    read_into(reader, [(index[name], local_boxes(tensor)) for name, tensor in stored.items()], advance)
    return {name: stored[index[name].same_as or name] for name in names}


def _allocate(reader: CheckpointReader, name: str, entry: TensorEntry) -> Tensor:
    try:
        return torch.empty(entry.shape, dtype=dtype_named(entry.dtype), device="cpu")
    except (RuntimeError, ValueError) as error:  # an enormous shape with a 0 in it, or a dtype that this torch lacks
        raise damaged_error(reader.path, f"{INDEX}: tensor {name[:200]!r}: {str(error).splitlines()[0]}") from error


def _decoded(
    reader: CheckpointReader, name: str, tensors: Mapping[str, Tensor], *, below: str = "", skips: bool = False
) -> Any:
    """Return the decoded values of a JSON file.

    Args:
        reader: The checkpoint.
        name: Of the file.
        tensors: The tensors by name.  Those without a reference in the file are inserted under their names.
        below: Common prefix of the tensors' names.
        skips: Whether references to other tensors are dropped; otherwise they are damage.
    """
    value = reader.document(name)
    used = set()

    def tensor(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"there is no tensor {name[:200]!r}")
        used.add(name)
        return tensors[name]

    try:
        decoded = decode(without_tensors(value, keep=tensors) if skips else value, tensor)
        if not isinstance(decoded, dict):
            raise ValueError(f"its values are a {type(decoded).__name__} and no dict")  # noqa: TRY004, TRY301 - about the file, as decode's
        # Rank 0 wrote the values, and tensors that only other ranks had are not in them: the stages of a pipeline.
        for unused in tensors.keys() - used:
            insert(decoded, split_name(unused.removeprefix(below)), tensors[unused])
    except (ValueError, RecursionError) as error:
        raise damaged_error(reader.path, f"{name}: {error}") from error
    return decoded


# Reads of tensors, in full or only the boxes that this process holds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Read:
    """A read of consecutive rows of a piece.

    Attributes:
        file: Name of the file.
        begin: Position of the first byte.
        dtype: Of the stored rows; the target's may differ.
        shape: Of the stored rows.
        box: The selection of them that is copied to the target, one slice per dimension.
        target: Memory of the box's shape.
    """

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    target: Tensor

    @property
    def num_bytes(self) -> int:
        """Number of bytes that are read."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the file can be read straight into the target, without a copy."""
        target = self.target
        same = target.numel() == math.prod(self.shape) and target.dtype == self.dtype
        return same and target.is_contiguous() and target.is_cpu


def read_into(
    reader: CheckpointReader,
    wanted: Iterable[tuple[TensorEntry, Sequence[LocalBox]]],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Read boxes of tensors into their memory.

    Args:
        reader: The checkpoint.
        wanted: Pairs of an index entry and this process's boxes of the tensor.
        advance: Called with the bytes of each read, in any thread.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    reads = [read for entry, boxes in wanted for local in boxes for read in _reads(entry, local)]
    reader.fetch((read.file, read.begin, read.begin + read.num_bytes) for read in reads)
    for name in sorted({read.file for read in reads}):  # opened here: CheckpointReader.file is not thread-safe
        reader.file(name)
    map_in_threads(lambda batch: _read_all(reader, batch, advance), list(_batches(reads)))


# A read, the first of its bytes that are read, and their memory; None for a read that is staged, and read in full.
_Portion: TypeAlias = "tuple[_Read, int, memoryview | None]"


def _batches(reads: list[_Read]) -> Iterator[list[_Portion]]:
    """Yield groups of portions in one bucket of a file, of which a thread reads the neighbors together."""
    batch: list[_Portion] = []
    bucket: tuple[str, int] | None = None
    for read in sorted(reads, key=attrgetter("file", "begin")):
        # Here, and not in the threads: each call of torch would pass the lock of Python from one to the next.
        memory = as_bytes(read.target).numpy().data if read.is_direct else None
        end, done = read.begin + read.num_bytes, read.begin
        while done < end:
            number = done // BUCKET
            if bucket != (read.file, number) and batch:
                yield batch
                batch = []
            bucket = (read.file, number)
            # Cut at the bucket's end, so that no block of the file is in two batches.
            limit = end if memory is None else min(end, (number + 1) * BUCKET)
            batch.append((read, done, None if memory is None else memory[done - read.begin : limit - read.begin]))
            done = limit
    if batch:
        yield batch


def _read_all(reader: CheckpointReader, batch: list[_Portion], advance: Callable[[int], None] | None) -> None:
    pieces: list[tuple[int, memoryview]] = []
    staged: list[tuple[_Read, Tensor]] = []
    for read, begin, memory in batch:
        if memory is None:  # another dtype or device, or rows of which the target takes only some columns
            stored = torch.empty(read.shape, dtype=read.dtype, device="cpu")
            staged.append((read, stored))
            memory = as_bytes(stored).numpy().data  # noqa: PLW2901 - that of the staged read
        pieces.append((begin, memory))
    reader.file(batch[0][0].file).read(pieces)
    for read, stored in staged:
        read.target.copy_(stored[read.box])
    if advance is not None:
        for read, _, memory in batch:
            advance(read.target.nbytes if memory is None else len(memory))


def _reads(entry: TensorEntry, local: LocalBox) -> Iterator[_Read]:
    """Yield the reads of a box, from each piece that overlaps it."""
    # A tensor without dimensions is read as a row of one element.
    target = local.tensor if local.tensor.dim() else local.tensor.reshape(1)
    starts, dtype = local.starts or (0,), dtype_named(entry.dtype)
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
    """Yield reads of consecutive rows of a piece, of about a bucket each.

    A row is the slice of the first dimension whose slices have at most a block, so that a narrow box of a wide tensor
    does not read much more than its own bytes.
    """
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
