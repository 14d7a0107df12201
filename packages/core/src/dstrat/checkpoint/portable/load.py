"""Load: nested values with whole tensors, or into tensors that exist already."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.checkpoint.portable.decode import decode, insert, joined, split, without_tensors
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
from dstrat.checkpoint.portable.shards import as_bytes, local_boxes
from dstrat.checkpoint.portable.storage import map_in_threads
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard, OptionalTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from dstrat.checkpoint.portable.index import Piece, TensorEntry
    from dstrat.checkpoint.portable.reader import CheckpointReader
    from dstrat.checkpoint.portable.shards import LocalBox


_PER_RANK_PREFIX = joined(PER_RANK, "")


def load(
    folder: CheckpointReader, *, rank: int, world_size: int, advance: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """Return the whole checkpoint, its tensors on the CPU, and this rank's own values if the world is as large.

    Raises:
        CheckpointError: It is damaged.
    """
    index = folder.index()
    tensors = read_tensors(folder, _of_the_job(index), advance)
    checkpoint = _decoded(folder, STATE, tensors)
    return _with_own(checkpoint, folder, index, rank=rank, world_size=world_size)


def load_into(folder: CheckpointReader, template: Mapping[str, Any], *, rank: int, world_size: int) -> dict[str, Any]:
    """Fill the tensors of a template, each process what it holds, and return the checkpoint with them in it.

    Args:
        folder: The checkpoint.
        template: Nested dicts and lists with tensors at the places where the checkpoint has them; of any placements.
            Tensors of the checkpoint that it does not have are returned whole; below a place where it has None none
            is read, and the result has none.
        rank: Of this process.
        world_size: Of this job.

    Raises:
        CheckpointError: It is damaged, lacks a tensor of the template, or has it in another shape or dtype.
    """
    index = folder.index()
    targets, optional, skipped = _targets(template)
    targets = {name: tensor for name, tensor in targets.items() if name in index or name not in optional}
    check_fits(folder, index, targets, converted=optional)
    read_into(folder, [(_stored(index, name), local_boxes(tensor, name)) for name, tensor in targets.items()])
    rest = [name for name in _of_the_job(index) if name not in targets and not name.startswith(skipped)]
    tensors = {**read_tensors(folder, rest), **targets}
    checkpoint = _decoded(folder, STATE, tensors, skips=bool(skipped))
    return _with_own(checkpoint, folder, index, rank=rank, world_size=world_size)


def _of_the_job(index: Mapping[str, TensorEntry]) -> list[str]:
    return [name for name in index if not name.startswith(_PER_RANK_PREFIX)]


def _targets(template: Mapping[str, Any]) -> tuple[dict[str, Any], set[str], tuple[str, ...]]:
    """Return the tensors of a template by name, which are optional, and what the names begin with that are unwanted."""
    targets: dict[str, Any] = {}
    optional: set[str] = set()
    skipped = []
    places: list[tuple[str, Any, bool]] = [("", template, False)]
    while places:
        path, value, is_optional = places.pop()
        is_optional = is_optional or isinstance(value, OptionalTensors)
        if isinstance(value, (Tensor, FlatShard)):
            targets[path] = value
            if is_optional:
                optional.add(path)
        elif value is None:
            skipped.append(joined(path, ""))
        elif isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            places += [(joined(path, key), item, is_optional) for key, item in items]
    return targets, optional, tuple(skipped)


def check_fits(
    folder: CheckpointReader,
    index: Mapping[str, TensorEntry],
    targets: Mapping[str, Any],
    *,
    converted: Container[str] = (),
) -> None:
    """Raise :class:`CheckpointError` where tensors are missing from the checkpoint, or are of another kind in it.

    Args:
        folder: The checkpoint.
        index: Its tensors.
        targets: Where they are wanted.
        converted: Names of targets that may have another dtype.
    """
    missing = sorted(name for name in targets if name not in index)
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(f"checkpoint {str(folder.path)!r} has no tensor {', '.join(missing[:5])}{more}")
    for name, tensor in targets.items():
        entry = index[name]
        fits = name in converted or entry.dtype == dtype_name(tensor.dtype)
        if not fits or entry.shape != tuple(tensor.shape):
            raise CheckpointError(
                f"tensor {name!r} is {entry.dtype} of shape {entry.shape} in checkpoint {str(folder.path)!r}, and "
                f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)} here"
            )


def load_rank_values(folder: CheckpointReader, rank: int) -> Any:
    """Return what one rank of the job that saved had under ``"per_rank"``.

    Raises:
        CheckpointError: It is damaged, or was saved by fewer ranks.
    """
    if not 0 <= rank < folder.manifest.world_size:
        raise CheckpointError(
            f"checkpoint {str(folder.path)!r} was saved by {folder.manifest.world_size} ranks: it has no rank {rank}"
        )
    return _rank_values(folder, folder.index(), rank)


def _with_own(
    checkpoint: dict[str, Any],
    folder: CheckpointReader,
    index: Mapping[str, TensorEntry],
    *,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    if world_size == folder.manifest.world_size:
        checkpoint[PER_RANK] = _rank_values(folder, index, rank)
    return checkpoint


def _rank_values(folder: CheckpointReader, index: Mapping[str, TensorEntry], rank: int) -> Any:
    prefix = joined(joined(PER_RANK, rank), "")
    tensors = read_tensors(folder, [name for name in index if name.startswith(prefix)])
    return _decoded(folder, rank_file(rank, "json"), tensors, below=prefix)


def read_tensors(
    folder: CheckpointReader, names: Iterable[str], advance: Callable[[int], None] | None = None
) -> dict[str, Tensor]:
    """Return whole tensors by name; those that share their memory are one.

    Args:
        folder: The checkpoint.
        names: Of tensors that it has.
        advance: Is told how many bytes more were read, in any thread.

    Raises:
        CheckpointError: It is damaged.
    """
    index, names = folder.index(), list(names)
    stored: dict[str, Tensor] = {}
    for name in names:
        first = index[name].same_as or name
        if first not in stored:
            stored[first] = _memory(folder, first, index[first])
    read_into(folder, [(index[name], local_boxes(tensor)) for name, tensor in stored.items()], advance)
    return {name: stored[index[name].same_as or name] for name in names}


def _memory(folder: CheckpointReader, name: str, entry: TensorEntry) -> Tensor:
    try:
        return empty_tensor(entry)
    except (RuntimeError, ValueError) as error:
        raise damaged_error(folder.path, f"{INDEX}: tensor {name[:200]!r}: {str(error).splitlines()[0]}") from error


def _stored(index: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    return index[index[name].same_as or name]


def _decoded(
    folder: CheckpointReader, name: str, tensors: Mapping[str, Tensor], *, below: str = "", skips: bool = False
) -> Any:
    """Return the values of a JSON file.

    Args:
        folder: The checkpoint.
        name: Of the file.
        tensors: What they refer to.  Those that they do not refer to (other ranks have them) are put where their
            names say.
        below: What the names of the tensors begin with.
        skips: Whether the file may refer to more tensors, which are then left out.
    """
    value = folder.document(name)
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
        for unused in tensors.keys() - used:
            insert(decoded, split(unused.removeprefix(below)), tensors[unused])
    except (ValueError, RecursionError) as error:
        raise damaged_error(folder.path, f"{name}: {error}") from error
    return decoded


# Reading tensors of a checkpoint into memory: whole, or only what this process holds of them.


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


def read_into(
    folder: CheckpointReader,
    wanted: Iterable[tuple[TensorEntry, Sequence[LocalBox]]],
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


def _read_all(folder: CheckpointReader, batch: list[_Read], advance: Callable[[int], None] | None) -> None:
    for read in batch:
        if read.is_direct:
            folder.file(read.file).read_into(as_bytes(read.target).numpy().data, read.begin)
        else:
            stored = torch.empty(read.shape, dtype=read.dtype)
            folder.file(read.file).read_into(as_bytes(stored).numpy().data, read.begin)
            read.target.copy_(stored[read.box])
        if advance is not None:
            advance(read.target.nbytes)


def _reads(entry: TensorEntry, part: LocalBox) -> Iterator[_Read]:
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
