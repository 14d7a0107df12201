"""Checkpoints in one file each, written by torch.save."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from dstrat.checkpoint.paths import place
from dstrat.checkpoint.portable.decode import joined
from dstrat.checkpoint.portable.local_files import remove_leftovers, written_whole
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO

if TYPE_CHECKING:
    from dstrat.checkpoint.paths import Place


_REFUSED = re.compile(r"GLOBAL (\S+)|(?:unsupported class|but got <class) '?([\w.]+)")


class TorchCheckpointIO(CheckpointIO):
    """One file for each checkpoint, which is there completely or not at all.

    It is written under a temporary name in the same folder, flushed to the disk and renamed; what a process leaves that
    is killed meanwhile is removed by the next save there.  Reading runs no code
    from the file (``weights_only=True``), so a checkpoint holds tensors and plain values; what could not be read back
    is refused when it is written.  To and from a store (a URL that fsspec reaches) it is copied by way of a temporary
    file of this machine.  Object stores show a file when all of it is there; file servers (``sftp://``, ``hdfs://``)
    show it while it is copied, and keep a part of it after a crash: portable folders are safe there too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        where = place(path)
        with storage_of(where).write_local(where) as file:
            self._save(checkpoint, file, where)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        where = place(path)
        with storage_of(where).read_local(where) as file:
            return self._load(file, where)

    def remove_checkpoint(self, path: str | Path) -> None:
        place(path).unlink(missing_ok=True)

    @staticmethod
    def _save(checkpoint: dict[str, Any], file: Path, path: Place) -> None:
        """Write a file; errors name the path that was asked for."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(file.parent)
            with written_whole(file) as temporary:
                _write(checkpoint, temporary)
                _check_loads(temporary, path)
        except CheckpointError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {str(path)!r} cannot be written: {_reason(error)}") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {str(path)!r} cannot be written, because it holds something that cannot be pickled "
                f"({error}): keep to tensors and plain values"
            ) from error

    def _load(self, file: Path, path: Place) -> dict[str, Any]:
        """Read a file; errors name the path that was asked for."""
        checkpoint = self._content(file, path)
        if not isinstance(checkpoint, dict):
            raise CheckpointError(
                f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__} and not a dict: "
                "load it with torch.load, or choose another file"
            )
        return checkpoint

    def _content(self, file: Path, path: Place) -> Any:
        _check_whole(file, path)
        return read_content(file, path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def _check_loads(temporary: Path, path: Place) -> None:
    """Read the structure of what was written, without its tensors' values."""
    read_content(temporary, path, doing="is not written, because it could not be read back", mmap=True)


def read_content(file: Path, path: Place, *, doing: str = "cannot be read", mmap: bool = False) -> Any:
    """Return what torch.save has written, without running code from it.

    Args:
        file: On this machine.
        path: What was asked for, for messages.
        doing: What is not possible where this fails.
        mmap: Whether tensors are read when they are used.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(file):
            raise _damaged(file, path) from error
        raise CheckpointError(f"checkpoint {str(path)!r} {doing}: {_refusal(str(error))}") from error
    except MemoryError:
        raise
    except Exception as error:  # bytes that are no checkpoint raise whatever they look like
        raise _unreadable(error, file, path) from error


def _check_whole(file: Path, path: Place) -> None:
    """Compare the checksums in the file, which torch.load does not."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise _unreadable(error, file, path) from error
    with stream:
        try:
            if not zipfile.is_zipfile(stream):
                return  # torch's older format, or something else: torch.load knows
            with zipfile.ZipFile(stream) as archive:
                is_whole = archive.testzip() is None
        except MemoryError:
            raise
        except Exception as error:  # as above
            raise _unreadable(error, file, path) from error
    if not is_whole:
        raise _damaged(file, path)


def _unreadable(error: Exception, file: Path, path: Place) -> CheckpointError:
    """Return the error about a file that could not be read: it is damaged, unless the system says something else."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # that is a seek before the beginning
        return CheckpointError(f"checkpoint {str(path)!r} cannot be read: {_reason(error)}")
    return _damaged(file, path)


def _damaged(file: Path, path: Place) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(path)!r} is damaged, or was not written by torch.save ({file.stat().st_size} bytes): "
        "load another one"
    )


def refused_name(message: str) -> str:
    """Return the name of the class or function that torch refuses to load; empty where its message has none."""
    found = _REFUSED.search(message)
    return (found.group(1) or found.group(2)) if found else ""


def _refusal(message: str) -> str:
    name = refused_name(message)
    if not name:
        return "it holds something else than tensors and plain values"
    return (
        f"it holds {name}, and only tensors and plain values are loaded without running code, whatever weights_only "
        f"says; to trust that class, call torch.serialization.add_safe_globals([{name}]) first"
    )


def _reason(error: BaseException) -> str:
    """Return the system's own words, which torch hides behind its own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            place = f" ({cause.filename!r})" if cause.filename else ""
            return cause.strerror.lower() + place
        cause = cause.__cause__ or cause.__context__
    return str(error)


# Reading files that hold objects of unknown classes: stand-ins take their place, and no code of these is run.


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
