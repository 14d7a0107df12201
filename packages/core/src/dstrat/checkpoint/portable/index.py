"""Index of a checkpoint's tensors: dtype, shape, and the files and bytes of their pieces."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import DTYPES, LARGEST_DIMENSIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box of a tensor that is stored in consecutive bytes of a file, in row-major order.

    Attributes:
        file: Name of the file.
        begin: Position of its first byte.
        starts: Its first element in the tensor, one number per dimension.
        shape: Its size in each dimension.
    """

    file: str
    begin: int
    starts: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """A tensor of the checkpoint.

    Attributes:
        dtype: Name of the dtype in torch, such as ``"float32"``.
        shape: Of the full tensor.
        pieces: Cover the tensor exactly once, in ascending order.
        same_as: Name of the tensor of which this one is an alias (tied weights); an alias has no pieces.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    same_as: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the full tensor in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].size


def index_from_json(value: Any, sizes: Mapping[str, int]) -> dict[str, TensorEntry]:
    """Return the validated entries of an index file, by name.

    Args:
        value: The parsed content of the file.
        sizes: Size in bytes of each file of the checkpoint.

    Raises:
        ValueError: The index contradicts itself or the files.  It is raised before memory is allocated for tensors.
    """
    try:
        files = list(value["files"])
        unknown = next((name for name in files if name not in sizes), None)
        if unknown is not None:
            raise ValueError(f"it names a file {unknown[:80]!r} that the manifest does not list")
        entries = {name: _from_json(name, entry, files) for name, entry in value["tensors"].items()}
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # a list for a dict, the number of no file ...
        raise ValueError(f"its structure is wrong ({error!r:.80})") from error
    for name, entry in entries.items():
        if entry.same_as is not None:
            _check_alias(name, entry, entry.same_as, entries)
    _check_bytes(entries, sizes)
    return entries


def check_shares(tensors: Mapping[str, Any], files: Sequence[str]) -> None:
    """Check what several ranks have contributed to an index, before it is written.

    The rest follows from how a rank writes its file: a tensor that is one piece is in it in full.

    Args:
        tensors: The entries as JSON, by name.
        files: The names of the ranks' files.

    Raises:
        ValueError: The pieces of a tensor do not cover it, or an alias is that of an alias.
    """
    checked = {
        name: _from_json(name, entry, files)
        for name, entry in tensors.items()
        if "same_as" in entry or list(map(len, entry["pieces"])) != [2]
    }
    for name, entry in checked.items():
        if (same_as := entry.same_as) is not None:
            stored = {same_as: _from_json(same_as, tensors[same_as], files)} if same_as in tensors else {}
            _check_alias(name, entry, same_as, stored)


def _from_json(name: str, entry: Any, files: Sequence[str]) -> TensorEntry:
    dtype, shape = entry["dtype"], _numbers(entry["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name[:200]!r} has a dtype {dtype!r:.80} that this dstrat does not know")
    if "same_as" in entry:
        return TensorEntry(dtype=dtype, shape=shape, same_as=str(entry["same_as"]))
    pieces = tuple([_piece(piece, shape, files) for piece in entry["pieces"]])
    if not _covers(pieces, shape):
        raise ValueError(f"the pieces of tensor {name[:200]!r} do not cover it exactly once")
    return TensorEntry(dtype=dtype, shape=shape, pieces=pieces)


_ONLY_INTEGERS = frozenset({int})


def _numbers(values: Any) -> tuple[int, ...]:
    if type(values) is not list or len(values) > LARGEST_DIMENSIONS:
        raise ValueError(f"{values!r:.80} is no shape")
    # Exactly int: True is one too.  torch's sizes are int64, and torch.empty raises a TypeError for larger ones.
    if not set(map(type, values)) <= _ONLY_INTEGERS or min(values, default=0) < 0 or max(values, default=0) >= 2**62:
        raise ValueError(f"{values!r:.80} is no shape")
    return tuple(values)


def _piece(value: Any, shape: tuple[int, ...], files: Sequence[str]) -> Piece:
    if type(value) is not list or len(value) not in (2, 4):
        raise ValueError(f"{value!r:.80} is no piece of a tensor")
    number, begin = value[:2]
    starts, size = (_numbers(value[2]), _numbers(value[3])) if len(value) > 2 else ((0,) * len(shape), shape)
    _numbers([number, begin])
    return Piece(file=files[number], begin=begin, starts=starts, shape=size)


def _covers(pieces: Sequence[Piece], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes of the pieces cover the shape without gaps and overlaps."""
    if math.prod(shape) == 0:
        return not pieces  # nothing is stored of a tensor without elements
    if len(pieces) == 1:
        return pieces[0].shape == shape and not any(pieces[0].starts) and len(pieces[0].starts) == len(shape)
    if any(len(piece.starts) != len(shape) or len(piece.shape) != len(shape) for piece in pieces):
        return False
    return _fills(pieces, shape, 0)


def _fills(pieces: Iterable[Piece], shape: tuple[int, ...], dimension: int) -> bool:
    """Return whether pieces cover a shape: their slabs along a dimension follow each other, and each slab is covered.

    This refuses exact covers that are not made of slabs; the boxes of shards always are.
    """
    if dimension == len(shape):
        return len(list(pieces)) == 1
    reached = 0
    for (start, size), slab in itertools.groupby(
        sorted(pieces, key=lambda piece: _extent(piece, dimension)), lambda piece: _extent(piece, dimension)
    ):
        if start != reached or size == 0 or not _fills(slab, shape, dimension + 1):
            return False
        reached += size
    return reached == shape[dimension]


def _extent(piece: Piece, dimension: int) -> tuple[int, int]:
    return piece.starts[dimension], piece.shape[dimension]


def _check_alias(name: str, entry: TensorEntry, same_as: str, entries: Mapping[str, TensorEntry]) -> None:
    other = entries.get(same_as)
    # Not an alias itself: two could name each other.
    if other is None or other.same_as is not None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
        raise ValueError(f"tensor {name[:200]!r} is said to be the same as {same_as[:200]!r}, which it cannot be")


def _check_bytes(entries: Mapping[str, TensorEntry], sizes: Mapping[str, int]) -> None:
    """Raise a ValueError unless pieces share no byte and end within their files."""
    extents: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in entries.items():
        for piece in entry.pieces:
            size = math.prod(piece.shape) * DTYPES[entry.dtype].size
            extents.setdefault(piece.file, []).append((piece.begin, piece.begin + size, name))
    for file, spans in extents.items():
        reached = 0
        for begin, end, name in sorted(spans):
            # Shared bytes could fill any amount of memory: a thousand tensors from the same gigabyte.
            if begin < reached or end > sizes[file]:
                raise ValueError(f"tensor {name[:200]!r} has bytes in {file} that are not its own")
            reached = end
