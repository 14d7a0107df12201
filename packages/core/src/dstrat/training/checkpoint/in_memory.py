"""Folders of checkpoints in the memory of the machine: each folder has one there, at the same path below a root."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.checkpoint.paths import as_path
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.checkpoint.paths import CheckpointPath

_MEMORY = Path("/dev/shm")  # noqa: S108 - the root below it is private


def folder_in_memory(folder: CheckpointPath) -> Path:
    """Return the folder in memory that belongs to a folder of checkpoints."""
    return _root() / str(folder.absolute()).replace("://", "/").lstrip("/")


def existing_in_memory(folders: Iterable[CheckpointPath]) -> list[Path]:
    """Return the folders in memory that belong to folders of checkpoints, and exist."""
    if not _MEMORY.is_dir() or not _is_private(_root()):
        return []
    return [path for path in map(folder_in_memory, folders) if path.is_dir()]


def is_in_memory(path: str | Path) -> bool:
    """Return whether a checkpoint is in memory."""
    local = as_path(path)
    return _MEMORY.is_dir() and isinstance(local, Path) and local.is_relative_to(_root())


def make_memory_root() -> None:
    """Create the root of checkpoints in memory, which only this user can change.

    Raises:
        CheckpointError: The machine has no such memory, or another user has created the root.
    """
    if not _MEMORY.is_dir():
        raise CheckpointError(
            f"InMemoryCheckpoint writes to {str(_MEMORY)!r}, which this system does not have: leave it out, or save to "
            "a disk, ModelCheckpoint(every_n_train_steps=..., async_save=True)"
        )
    root = _root()
    root.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(root):
        raise CheckpointError(
            f"InMemoryCheckpoint writes to {str(root)!r}, which another user has created or may change: remove it, or "
            "leave InMemoryCheckpoint out"
        )


def _root() -> Path:
    return _MEMORY / f"dstrat-{os.geteuid()}"


def _is_private(root: Path) -> bool:
    try:
        status = root.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
