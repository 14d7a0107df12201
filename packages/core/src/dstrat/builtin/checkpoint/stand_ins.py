"""Reading files that hold objects of unknown classes: stand-ins take their place, and no code of these is run."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from dstrat.builtin.checkpoint.portable.marks import joined
from dstrat.builtin.checkpoint.torch_file import TorchCheckpointIO, read_content, refused_name
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from dstrat.builtin.checkpoint.place import Place

_NAMESPACE = "argparse.Namespace"


class StandIn:
    """Stands for an object of a class, or for what a function would return, which is neither imported nor called.

    Attributes:
        name: Of the class or function.
        state: What the object has been given, as far as it is known.
    """

    name: ClassVar[str]
    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> StandIn:  # noqa: PYI034 - pickles call it with whatever there is
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StandInCheckpointIO(TorchCheckpointIO):
    """Reads files of torch.save; what is no tensor and no plain value is a :class:`StandIn` then.

    A namespace of argparse, a path and a dict of another class are what they consist of.

    Args:
        is_mapped: Whether tensors are read when they are used, without comparing checksums.
    """

    def __init__(self, is_mapped: bool = False) -> None:
        self._is_mapped = is_mapped

    @override
    def _content(self, file: Path, path: Place) -> Any:
        try:
            with torch.serialization.safe_globals(stand_ins(file)):
                if self._is_mapped and zipfile.is_zipfile(file):
                    return read_content(file, path, mmap=True)
                return super()._content(file, path)
        except CheckpointError as error:
            if isinstance(error.__cause__, pickle.UnpicklingError) and zipfile.is_zipfile(file):
                name = refused_name(str(error.__cause__))
                raise CheckpointError(
                    f"checkpoint {str(path)!r} is not read: it holds {name or 'something'} that cannot be read without "
                    "running code; write it again without that, by the program that has written it"
                ) from error
            raise


def stand_ins(file: Path) -> list[Any]:
    """Return what takes the place of each class and function in a file that torch does not trust, with its name."""
    find = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)  # which came with torch 2.6
    try:
        names = [] if find is None else find(file)
    except Exception:  # noqa: BLE001 - bytes that are no checkpoint raise whatever they look like; reading tells of them
        return []
    return [(_stand_in(name), name) for name in names]


def without_stand_ins(value: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return a nested value without the parts that are stand-ins, and the names of these by their places.

    Args:
        value: Of dicts and other plain values.
        path: The name of its place.
    """
    left_out: dict[str, str] = {}
    return _kept(value, path, left_out), left_out


class _Missing:
    """Stands for a part that is left out."""


def _kept(value: Any, path: str, left_out: dict[str, str]) -> Any:
    if isinstance(value, StandIn) and value.name == _NAMESPACE and isinstance(value.state, dict):
        value = value.state
    if isinstance(value, StandIn) or (isinstance(value, type) and issubclass(value, StandIn)):
        left_out[path] = value.name
        return _Missing
    if isinstance(value, dict):
        parts = {key: _kept(part, joined(path, key), left_out) for key, part in value.items() if _is_plain(key)}
        left_out |= {joined(path, type(key).__name__): "key" for key in value if not _is_plain(key)}
        return type(value)({key: part for key, part in parts.items() if part is not _Missing})
    if isinstance(value, list | tuple | set | frozenset):
        parts_in_order = [_kept(part, joined(path, number), left_out) for number, part in enumerate(value)]
        if any(part is _Missing for part in parts_in_order):
            return _Missing
        return parts_in_order if isinstance(value, list) else _like(value, parts_in_order)
    return value


def _like(value: Any, parts: list[Any]) -> Any:
    return value if isinstance(value, torch.Size) else type(value)(parts)


def _is_plain(key: Any) -> bool:
    return not isinstance(key, StandIn | type)


def _stand_in(name: str) -> Any:
    if name == "collections.defaultdict" or name.endswith(".AttributeDict"):
        return type("Dict", (), {"__new__": _new_dict})
    if name.startswith("pathlib.") and name.endswith("Path"):
        return type("PathText", (), {"__new__": _new_path})
    return type("StandIn", (StandIn,), {"name": name})


def _new_dict(_: type, *__: Any) -> dict[Any, Any]:
    return {}


def _new_path(_: type, *parts: str) -> str:
    return str(PurePosixPath(*parts))
