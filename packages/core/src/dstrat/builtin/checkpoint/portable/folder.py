"""Folders that are there completely or not at all: written under a temporary name, locked while somebody writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.layout import MANIFEST
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PREFIX, _SUFFIX = ".dstrat-", ".tmp"


class UnfinishedFolder:
    """A folder beside its target, invisible to readers until :meth:`commit`.

    Its writer holds a lock on it that the system takes away when the process ends, however it ends; so a folder of
    that name without a lock is a leftover of a crash.

    Args:
        target: The path that it will have.

    Raises:
        CheckpointError: The target exists already.
        OSError: The folder cannot be created.
    """

    def __init__(self, target: Path) -> None:
        check_free(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target.parent)
        self.target = target
        self.path, self._lock = _create_locked(target.parent)

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, give the folder, whose files are flushed, its final name, and flush that."""
        check_free(self.target)
        write_flushed(self.path / MANIFEST, manifest)
        flush_folder(self.path)
        self.path.rename(self.target)
        flush_folder(self.target.parent)

    def close(self) -> None:
        """Remove the folder where it was not committed, and let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def check_free(target: Path) -> None:
    """Raise :class:`CheckpointError` where there is something already."""
    if os.path.lexists(target):
        raise CheckpointError(
            f"checkpoint {str(target)!r} exists already, and none is ever written over: "
            "choose another path, or remove it first"
        )


def _create_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        path.mkdir()
        descriptor = _locked(path)
        if descriptor is not None and path.exists():
            return path, descriptor
        if descriptor is not None:
            os.close(descriptor)  # somebody who cleans up was faster than the lock


def _locked(path: Path, *, needs_lock: bool = False) -> int | None:
    """Return a descriptor that holds the lock of a folder; None where another one holds it, or it is gone.

    On a file system without locks it is one without, unless that is needed: then nobody removes leftovers.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError) or needs_lock:
            os.close(descriptor)
            return None
    return descriptor


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove what crashed writers have left in a folder, and return it; what is still being written stays."""
    removed = []
    for path in sorted(parent.glob(f"{_PREFIX}*{_SUFFIX}")):
        descriptor = _locked(path, needs_lock=True) if path.is_dir() and not path.is_symlink() else None
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
            removed.append(path)
    return removed


def flush_folder(folder: Path) -> None:
    """Flush what was created, renamed and removed in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that takes the place of an older one at once."""
    with written_whole(path) as temporary:
        write_flushed(temporary, data)


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield where to write a file, which gets its own path when the block has ended well."""
    folder, lock = _create_locked(path.parent)
    try:
        yield folder / path.name
        (folder / path.name).replace(path)
        flush_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_folder(path: Path) -> None:
    """Remove a folder, so that a crash in between leaves nothing that looks like one."""
    doomed = path.parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
