"""Detection of a checkpoint's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import RemotePath, as_path
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.local_files import remove_stale
from dstrat.checkpoint.portable.newest import is_complete, is_portable, step_of
from dstrat.checkpoint.torch_file import TorchCheckpointIO, read_content
from dstrat.errors import CheckpointError, DstratError

if TYPE_CHECKING:
    from collections.abc import Callable

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


def unused_beside(path: str | Path, io: CheckpointIO) -> str | None:
    """Return another path for a checkpoint where a folder is to be written, and something is there; otherwise None."""
    target = as_path(path)
    exists: Callable[[Any], bool] = os.path.lexists if isinstance(target, Path) else RemotePath.exists
    if type(io.file_io) is not PortableCheckpointIO or not exists(target):
        return None
    name, version = target.name.removesuffix(target.suffix), 1
    while exists(other := target.parent / f"{name}-v{version}{target.suffix}"):
        version += 1
    return str(other)


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
