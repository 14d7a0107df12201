"""Content of a checkpoint, in one form for folders and single files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.portable.index import TensorEntry
from dstrat.builtin.checkpoint.portable.layout import STATE
from dstrat.builtin.checkpoint.portable.newest import is_portable, resolved
from dstrat.builtin.checkpoint.portable.opened_folder import OpenedFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from dstrat.builtin.checkpoint.place import Place


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The values of a checkpoint, and what there is to know of its tensors.

    Attributes:
        values: The plain values, as the JSON of a folder holds them.
        tensors: The tensors, by name.
        read: Returns a tensor, by its name.
        unknown: The classes of what cannot be read, by the names of the places.
    """

    values: Any
    tensors: Mapping[str, TensorEntry]
    read: Callable[[str], Tensor]
    unknown: Mapping[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def content_of(path: Place) -> Iterator[Content]:
    """Open a checkpoint in a ``with`` block; tensors of a file are read when they are asked for, those of a folder too.

    Raises:
        CheckpointError: It is none, or is damaged.
    """
    if is_single_file(path):
        yield content_of_file(path)
        return
    with OpenedFolder(resolved(path)) as folder:
        yield Content(values=folder.document(STATE), tensors=folder.index(), read=lambda name: _read(folder, name))


def is_single_file(path: Place) -> bool:
    """Return whether there is a file, and none that names a folder beside it."""
    return path.is_file() and not is_portable(path)


def content_of_file(path: Place) -> Content:
    """Return what a file of torch.save holds, which is read without running code from it.

    Raises:
        CheckpointError: It cannot be read.
    """
    from dstrat.builtin.checkpoint.portable.encoding import encode
    from dstrat.builtin.checkpoint.stand_ins import StandInCheckpointIO, without_stand_ins

    values, unknown = without_stand_ins(StandInCheckpointIO(is_mapped=True).load_checkpoint(str(path)))
    encoded = encode(values)
    return Content(
        values=encoded.value,
        tensors=_entries(encoded.tensors),
        read=lambda name: encoded.tensors[name].detach().contiguous(),
        unknown=unknown,
    )


def _read(folder: OpenedFolder, name: str) -> Tensor:
    from dstrat.builtin.checkpoint.portable.loading import read_tensors

    return read_tensors(folder, [name])[name]


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    from dstrat.builtin.checkpoint.portable.dtypes import dtype_name

    first: dict[Any, str] = {}
    entries = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        memory = (tensor.data_ptr(), shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        other = first.setdefault(memory, name)
        entries[name] = TensorEntry(
            dtype=dtype_name(tensor.dtype), shape=shape, same_as=None if other == name else other
        )
    return entries
