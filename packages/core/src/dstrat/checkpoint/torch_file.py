"""Checkpoint io of single files in the format of torch.save."""

from __future__ import annotations

import errno
import os
import pickle
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.decode import join_name
from dstrat.checkpoint.portable.local_files import atomic_write, remove_stale
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError
from dstrat.interfaces.batch import apply_to_columns
from dstrat.interfaces.checkpoint_io import CheckpointIO

if TYPE_CHECKING:
    from dstrat.checkpoint.paths import CheckpointPath


# torch has no attribute for the name, only these wordings of its message, which differ between its versions.
_REFUSED = re.compile(r"GLOBAL (\S+)|(?:unsupported class|but got <class) '?([\w.]+)")


class TorchCheckpointIO(CheckpointIO):
    """Checkpoints in one file each, written atomically by ``torch.save``.

    A file is written under a temporary name in the same folder, flushed to the disk and renamed; the next save removes
    the temporary file of a process that was killed.  Loading runs no code from the file (``weights_only=True``), so a
    checkpoint holds tensors and plain values, and a save refuses anything that could not be loaded again, but writes
    numbers of numpy as Python's.  Files of a
    store (a URL that fsspec supports) are copied through a temporary local file.  Object stores show a file only when
    it is complete; file servers (``sftp://``, ``hdfs://``) show it while it is copied, and keep a truncated one after
    a crash: portable folders are safe there too.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        target = as_path(path)
        with storage_of(target).write_local(target) as file:
            self._save(checkpoint, file, target)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        source = as_path(path)
        try:
            with storage_of(source).read_local(source) as file:
                return self._load(file, source)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"checkpoint {str(path)!r} cannot be read: {_reason(error)}") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        as_path(path).unlink(missing_ok=True)

    @staticmethod
    def _save(checkpoint: dict[str, Any], file: Path, path: CheckpointPath) -> None:
        """Write a local file; errors name the requested path, which may be a URL."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(file.parent)
            with atomic_write(file) as temporary:
                _write(checkpoint, temporary)
                try:
                    _check_readable(temporary, path)
                except CheckpointError:
                    # A learning rate may be a number of numpy, which torch.load refuses.
                    plain = apply_to_columns(checkpoint, _is_number_of_numpy, _as_plain)
                    if plain is checkpoint:
                        raise
                    _write(plain, temporary)
                    _check_readable(temporary, path)
        except CheckpointError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {str(path)!r} cannot be written: {_reason(error)}") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint {str(path)!r} cannot be written, because it holds something that cannot be pickled "
                f"({error}): keep to tensors and plain values"
            ) from error

    def _load(self, file: Path, path: CheckpointPath) -> dict[str, Any]:
        """Read a local file; errors name the requested path, which may be a URL."""
        checkpoint = self._content(file, path)
        if not isinstance(checkpoint, dict):
            raise CheckpointError(
                f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__} and not a dict: "
                "load it with torch.load, or choose another file"
            )
        return checkpoint

    def _content(self, file: Path, path: CheckpointPath) -> Any:
        _check_zip_checksums(file, path)
        return read_content(file, path)


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())  # or the rename may reach the disk before the content


def _check_readable(file: Path, path: CheckpointPath) -> None:
    # torch.save pickles any object, torch.load refuses most: better an error now than at the resume.
    # With a memory map this reads the structure alone, not the tensors' values.
    read_content(file, path, failure="is not written, because it could not be read back", mmap=True)


def _is_number_of_numpy(value: Any) -> bool:
    return isinstance(value, np.generic)


def _as_plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def read_content(file: Path, path: CheckpointPath, *, failure: str = "cannot be read", mmap: bool = False) -> Any:
    """Return the content of a file of torch.save, without running code from it.

    Args:
        file: On this machine.
        path: The requested path, for messages.
        failure: The predicate of the error message.
        mmap: Whether tensors are memory-mapped, and read when they are used.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(file):
            raise _damaged(file, path) from error
        raise CheckpointError(f"checkpoint {str(path)!r} {failure}: {_refusal(str(error), file)}") from error
    except MemoryError:
        raise
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} {failure}: torch reads no file whose path is not UTF-8, give another path"
        ) from error
    except Exception as error:  # damaged bytes raise almost any class: EOFError, KeyError, RuntimeError, ...
        raise _unreadable(error, file, path) from error


def _check_zip_checksums(file: Path, path: CheckpointPath) -> None:
    """Verify the checksums of the zip archive, which torch.load ignores."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise _unreadable(error, file, path) from error
    with stream:
        try:
            if not zipfile.is_zipfile(stream):
                return  # torch's format before 1.6, without checksums, or no checkpoint: torch.load decides
            with zipfile.ZipFile(stream) as archive:
                is_intact = archive.testzip() is None
        except MemoryError:
            raise
        except Exception as error:  # damaged archives raise almost any class too
            raise _unreadable(error, file, path) from error
    if not is_intact:
        raise _damaged(file, path)


def _unreadable(error: Exception, file: Path, path: CheckpointPath) -> CheckpointError:
    """Return the error about an unreadable file: the system's reason if it has one, otherwise that it is damaged."""
    # EINVAL comes from damage too: a wrong offset in the archive is a seek to a negative position.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        return CheckpointError(f"checkpoint {str(path)!r} cannot be read: {_reason(error)}")
    return _damaged(file, path)


def _damaged(file: Path, path: CheckpointPath) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(path)!r} is damaged, or was not written by torch.save ({file.stat().st_size} bytes): "
        "load another one"
    )


def refused_name(message: str) -> str:
    """Return the name of the class or function that torch refuses to load; empty if its message has none."""
    match = _REFUSED.search(message)
    return (match.group(1) or match.group(2)) if match else ""


def _refusal(message: str, file: Path) -> str:
    name = refused_name(message)
    if not name:
        return "it holds something else than tensors and plain values"
    # torch's message has the first name alone; whoever trusts that one would meet the next only at the next save.
    refused = {*_names_torch_does_not_trust(file), name}
    names = ", ".join(sorted(refused, key=lambda one: (one != name, one)))  # that of torch's message first
    return (
        f"it holds {names}, and only tensors and plain values are loaded without running code, whatever weights_only "
        f"says; to trust {'these classes' if len(refused) > 1 else 'that class'}, call "
        f"torch.serialization.add_safe_globals([{names}]) first"
    )


def _names_torch_does_not_trust(file: Path) -> list[str]:
    """Return the names of classes and functions in a file, without importing or running their code."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # noqa: BLE001 - damaged bytes raise almost any class; reading the file reports the damage
        return []


def _reason(error: BaseException) -> str:
    """Return the system's reason, which torch wraps in an error of its own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            file = f" ({cause.filename!r})" if cause.filename else ""
            return cause.strerror.lower() + file
        cause = cause.__cause__ or cause.__context__
    return str(error)


# Files with objects of unknown classes: stand-ins replace these, without importing or running their code


_NAMESPACE = "argparse.Namespace"


class StandIn:
    """A placeholder for an object whose class or factory function is neither imported nor called.

    Attributes:
        name: Of the class or function.
        state: The state in the pickle; None if it has none.
    """

    name: ClassVar[str]
    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> StandIn:  # noqa: PYI034 - unpickled with the real class's arguments
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class StandInCheckpointIO(TorchCheckpointIO):
    """Reader of any file of torch.save, with a :class:`StandIn` for each object that is neither tensor nor plain value.

    A path becomes a str, and a dict of another class a plain dict.

    Args:
        is_mapped: Whether tensors are memory-mapped, without verifying checksums.
    """

    def __init__(self, is_mapped: bool = False) -> None:
        self._is_mapped = is_mapped

    @override
    def _content(self, file: Path, path: CheckpointPath) -> Any:
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
    """Return pairs of a stand-in and the name of the class or function in a file that it replaces.

    torch trusts its own classes; only the names that it does not trust are in the list.
    """
    return [(_stand_in(name), name) for name in _names_torch_does_not_trust(file)]


def without_stand_ins(value: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return a nested value without its stand-ins, and the class names of these by the names of their values.

    A list or tuple with a stand-in is dropped as a whole, since its other items would change their positions.

    Args:
        value: Of dicts and other plain values.
        path: The name of the value.
    """
    dropped: dict[str, str] = {}
    return _without_stand_ins(value, path, dropped), dropped


class _Missing:
    """A marker for a value that is dropped; None is a value itself."""


def _without_stand_ins(value: Any, path: str, dropped: dict[str, str]) -> Any:
    if isinstance(value, StandIn) and value.name == _NAMESPACE and isinstance(value.state, dict):
        value = value.state  # hyperparameters are often a namespace of argparse
    if isinstance(value, StandIn) or (isinstance(value, type) and issubclass(value, StandIn)):
        dropped[path] = value.name
        return _Missing
    if isinstance(value, dict):
        plain = {key: item for key, item in value.items() if _is_plain(key)}
        items = {key: _without_stand_ins(item, join_name(path, key), dropped) for key, item in plain.items()}
        dropped |= {join_name(path, type(key).__name__): "key" for key in value if not _is_plain(key)}
        return type(value)({key: item for key, item in items.items() if item is not _Missing})
    if isinstance(value, list | tuple | set | frozenset):
        sequence = [_without_stand_ins(item, join_name(path, number), dropped) for number, item in enumerate(value)]
        if any(item is _Missing for item in sequence):
            return _Missing
        return type(value)(sequence)
    return value


def _is_plain(key: Any) -> bool:
    return not isinstance(key, StandIn | type)


def _stand_in(name: str) -> Any:
    # Dicts and paths keep their content: it is in their constructor's arguments or their items, not in a state.
    if name == "collections.defaultdict" or name.endswith(".AttributeDict"):
        return type("Dict", (), {"__new__": _new_dict})
    if name.startswith("pathlib.") and name.endswith("Path"):
        return type("PathText", (), {"__new__": _new_path})
    return type("StandIn", (StandIn,), {"name": name})


def _new_dict(_: type, *__: Any) -> dict[Any, Any]:
    return {}


def _new_path(_: type, *segments: str) -> str:
    return str(PurePosixPath(*segments))
