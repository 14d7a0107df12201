"""Detection of a checkpoint's format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.format import MANIFEST
from dstrat.checkpoint.portable.local_files import remove_stale, unused_beside
from dstrat.checkpoint.portable.memory_files import is_in_memory
from dstrat.checkpoint.portable.newest import is_complete, is_portable, step_of
from dstrat.checkpoint.torch_file import TorchCheckpointIO, read_content
from dstrat.errors import CheckpointError, DstratError
from dstrat.plugins.catalog import get_catalog

if TYPE_CHECKING:
    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.interfaces.checkpoint_io import CheckpointIO


def io_for(path: str | Path, default: CheckpointIO) -> CheckpointIO:
    """Return the checkpoint io that reads a checkpoint.

    It is the run's, except that the two built-in formats are told apart: a run with either of them reads both.

    Args:
        path: Of the checkpoint.
        default: The checkpoint io of the run.

    Raises:
        CheckpointError: The path cannot be accessed.
    """
    inner = default.file_io
    try:
        target = as_path(path)
        # The exact types, as in is_builtin: a subclass may have another format, and reads its own checkpoints.
        if type(inner) is TorchCheckpointIO and is_portable(target):
            return PortableCheckpointIO()
        if type(inner) is PortableCheckpointIO and target.is_file() and not is_portable(target):
            return TorchCheckpointIO()
    except OSError as error:
        if isinstance(error, DstratError):
            raise
        # Path.exists() is False for most errors, but raises for a name that is too long and a folder without access.
        raise CheckpointError(
            f"cannot read checkpoint {str(path)!r}: {error.strerror or error}: give another path"
        ) from error
    return default


def is_builtin(io: CheckpointIO) -> bool:
    """Return whether a checkpoint io is one of this package, whose saves are atomic."""
    return type(io.file_io) in (TorchCheckpointIO, PortableCheckpointIO)


def portable_io(io: CheckpointIO) -> PortableCheckpointIO | None:
    """Return the portable checkpoint io that a checkpoint io is or writes with; None if it has another format."""
    inner = io.file_io
    return inner if isinstance(inner, PortableCheckpointIO) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupied:
    """A path at which a folder is to be written, and something is.

    Attributes:
        is_movable: Whether that can be moved beside it: a checkpoint, a file or an empty folder on a disk.
        is_checkpoint: Whether that is a checkpoint, of any program.
        other: An unused path beside it.
    """

    is_movable: bool
    is_checkpoint: bool
    other: str


def find_occupied(path: str | Path, io: CheckpointIO) -> Occupied | None:
    """Return what is at the path of a checkpoint that is to be a folder; None if nothing is, or it is to be a file.

    Raises:
        OSError: The path cannot be accessed.
    """
    target = as_path(path)
    if type(io.file_io) is not PortableCheckpointIO:
        return None
    if not (os.path.lexists(target) if isinstance(target, Path) else target.exists()):
        return None
    is_checkpoint = (target / MANIFEST).exists()
    if isinstance(target, Path):
        from dstrat.checkpoint.foreign import reader_of

        is_single = target.is_symlink() or not target.is_dir() or not any(target.iterdir())
        is_movable = (is_checkpoint or is_single) and not is_in_memory(target)
        is_checkpoint = is_checkpoint or is_movable or reader_of(target, get_catalog()) is not None
        return Occupied(is_movable=is_movable, is_checkpoint=is_checkpoint, other=str(unused_beside(target)))
    name, version = target.name.removesuffix(target.suffix), 1
    while (other := target.parent / f"{name}-v{version}{target.suffix}").exists():
        version += 1
    return Occupied(is_movable=False, is_checkpoint=is_checkpoint, other=str(other))


def recover_checkpoint(path: str, step: int, *, io: CheckpointIO) -> bool:
    """Remove the stale files of a killed save, and return whether the checkpoint itself is complete.

    Args:
        path: Its path or URL; a single file may be the older one that the killed save was to replace.
        step: The number of optimizer steps after which it was to be saved.
        io: The checkpoint io that has saved it.  For a custom one only the existence of the path is checked.
    """
    file_or_folder = as_path(path)
    if isinstance(file_or_folder, Path) and file_or_folder.parent.is_dir():
        remove_stale(file_or_folder.parent, claims_of_any_age=True)
    if not is_builtin(io):
        return file_or_folder.exists()
    try:
        if file_or_folder.is_dir():
            return is_complete(file_or_folder) and step_of(file_or_folder) == step
        return _step_of_file(file_or_folder) == step
    except OSError:  # the store or disk fails, or the file is damaged: a CheckpointError is an OSError
        return False


def _step_of_file(path: CheckpointPath) -> int | None:
    if not isinstance(path, Path):
        return None if not path.is_file() else read_step(TorchCheckpointIO().load_checkpoint(str(path)))
    return read_step(read_content(path, path, mmap=True))  # does not read the values of tensors


def read_step(content: object) -> int | None:
    """Return the number of optimizer steps in the content of a single file; None if it is absent."""
    step = content.get("global_step") if isinstance(content, dict) else None
    return step if isinstance(step, int) else None
