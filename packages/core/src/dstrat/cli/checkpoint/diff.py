"""``dstrat checkpoint diff``: differences between two checkpoints."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from dstrat.checkpoint.portable.decode import join_name
from dstrat.checkpoint.portable.format import PER_RANK, STATE
from dstrat.checkpoint.portable.index import TensorEntry
from dstrat.checkpoint.portable.newest import is_portable, resolve
from dstrat.checkpoint.portable.reader import CheckpointReader
from dstrat.cli.checkpoint.group import CHECKPOINT_PATH, progress_bar
from dstrat.cli.output import json_option, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from dstrat.checkpoint.paths import CheckpointPath


_ABSENT = "-"
Difference = tuple[str, str, str, str]
"""Name, value in the first checkpoint, value in the second, and distance of the two."""


@click.command(short_help="Show where two checkpoints differ.")
@click.argument("first", type=CHECKPOINT_PATH)
@click.argument("second", type=CHECKPOINT_PATH)
@json_option
@click.pass_context
def diff(ctx: click.Context, first: CheckpointPath, second: CheckpointPath, as_json: bool) -> None:
    """Show where two checkpoints differ in values and tensors; exit with 1 if they do.

    Each is a folder or a single file.  Shards, and the state of each rank, are not compared.
    """
    with content_of(first) as one, content_of(second) as other:
        values = [
            *_values("", _without_ranks(one.values), _without_ranks(other.values)),
            *_values("", dict(one.unknown), dict(other.unknown)),
        ]
        size = sum(entry.num_bytes for entry in one.tensors.values())
        with progress_bar("comparing", size) as advance:
            tensors = list(_tensors(one, other, advance))
    differences = [*values, *tensors]
    if as_json:
        keys = ("name", "first", "second", "difference")
        print_json({"differences": [dict(zip(keys, row, strict=True)) for row in differences]})
    elif differences:
        print_table(differences, ["name", "first", "second", "difference"])
    else:
        click.echo("both hold the same values and tensors")
    ctx.exit(1 if differences else 0)


def _without_ranks(values: Any) -> Any:
    """Return values without those of each rank, which only a single file has among them."""
    return {name: value for name, value in values.items() if name != PER_RANK} if isinstance(values, dict) else values


def _values(name: str, one: Any, other: Any) -> Iterator[Difference]:
    """Yield the differences of plain values."""
    # Tensors are marks with their names here; their values are compared later, one at a time.
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            yield from _values(join_name(name, key), one.get(key, _NoValue), other.get(key, _NoValue))
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for position, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _values(join_name(name, position), a, b)
    elif type(one) is not type(other) or one != other:
        yield name, _shown(one), _shown(other), _distance(one, other)


class _NoValue:
    """Stands for a value that one of the two checkpoints lacks."""


def _shown(value: Any) -> str:
    return _ABSENT if value is _NoValue else f"{value!r:.60}"


def _distance(one: Any, other: Any) -> str:
    numbers = [value for value in (one, other) if type(value) in (int, float)]
    return f"{numbers[1] - numbers[0]:+g}" if len(numbers) == 2 else ""


def _tensors(one: Content, other: Content, advance: Callable[[int], None]) -> Iterator[Difference]:
    ours, theirs = (
        {name: entry for name, entry in content.tensors.items() if not name.startswith(f"{PER_RANK}/")}
        for content in (one, other)
    )
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        facts = [f"{side[name].dtype} {list(side[name].shape)}" if name in side else _ABSENT for side in (ours, theirs)]
        if facts[0] != facts[1]:  # without reading them
            yield name, facts[0], facts[1], ""
            continue
        distance = _tensor_distance(one.read(name), other.read(name))
        advance(ours[name].num_bytes)
        if distance is not None:
            yield name, facts[0], facts[1], distance


def _tensor_distance(one: Tensor, other: Tensor) -> str | None:
    """Return the distance of two tensors with the same shape and dtype as text; None if their bits are equal."""
    import torch

    from dstrat.checkpoint.portable.payload import as_bytes

    if torch.equal(as_bytes(one), as_bytes(other)):  # by bits, so that NaN is equal to itself
        return None
    # In float64: the difference of small integers or low-precision floats could overflow or be rounded.
    a, b = (tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (one, other))
    apart = (a - b).abs()
    return f"{int((apart > 0).sum())} of {apart.numel()} elements, at most {apart.max().item():.3g} apart"


# Content of a checkpoint, in one form for folders and single files


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The values of a checkpoint, and the entries of its tensors.

    Attributes:
        values: The plain values, as in the JSON of a folder.
        tensors: The entries of the tensors, by name.
        read: Returns a tensor, from its name.
        unknown: Classes of values that cannot be read, by the names of the values.
    """

    values: Any
    tensors: Mapping[str, TensorEntry]
    read: Callable[[str], Tensor]
    unknown: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def content_of(path: CheckpointPath) -> Iterator[Content]:
    """Open a checkpoint, whose tensors are read one at a time.

    Raises:
        CheckpointError: It is no checkpoint, or is damaged.
    """
    if is_single_file(path):
        yield content_of_file(path)
        return
    with CheckpointReader(resolve(path)) as folder:
        yield Content(values=folder.document(STATE), tensors=folder.index(), read=lambda name: _read(folder, name))


def is_single_file(path: CheckpointPath) -> bool:
    """Return whether a checkpoint is one file of torch, and not the file ``last`` that names a folder beside it."""
    return path.is_file() and not is_portable(path)


def content_of_file(path: CheckpointPath) -> Content:
    """Return the content of a file of torch.save, which is read without running code from it.

    Raises:
        CheckpointError: It cannot be read.
    """
    from dstrat.checkpoint.portable.encode import encode
    from dstrat.checkpoint.torch_file import StandInCheckpointIO, without_stand_ins

    values, unknown = without_stand_ins(StandInCheckpointIO(is_mapped=True).load_checkpoint(str(path)))
    encoded = encode(values)
    return Content(
        values=encoded.value,
        tensors=_entries(encoded.tensors),
        read=lambda name: encoded.tensors[name].detach().contiguous(),
        unknown=unknown,
    )


def _read(folder: CheckpointReader, name: str) -> Tensor:
    from dstrat.checkpoint.portable.load import read_tensors

    return read_tensors(folder, [name])[name]


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    from dstrat.checkpoint.portable.format import dtype_name

    first: dict[Any, str] = {}  # the first name of tensors that share memory
    entries = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        memory = (tensor.data_ptr(), shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        other = first.setdefault(memory, name)
        entries[name] = TensorEntry(
            dtype=dtype_name(tensor.dtype), shape=shape, same_as=None if other == name else other
        )
    return entries
