"""Folders that are there completely or not at all: written under a temporary name, locked while somebody writes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.layout import MANIFEST
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PREFIX, _SUFFIX, _CLAIM_SUFFIX = ".dstrat-", ".tmp", ".claim"
_LEFTOVER_SECONDS = 24 * 3600


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


class Claim:
    """Keeps a path for a checkpoint that is going to be written, so that no other job chooses it meanwhile.

    It is a file beside the path, with a lock that the system takes away when the process ends, however it ends.  On a
    file system without locks nothing is kept.

    Args:
        path: Where the checkpoint will be.
    """

    def __init__(self, path: Path) -> None:
        # A digest, as the name of a checkpoint may be as long as a name can be.
        name = hashlib.sha256(path.name.encode(errors="surrogateescape")).hexdigest()[:16]
        self._file = path.with_name(f"{_PREFIX}{name}{_CLAIM_SUFFIX}")
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Return whether the path is this process's now; otherwise another one is going to write there."""
        try:
            return self._take()
        except OSError:  # of which the save that follows says more
            return True

    def _take(self) -> bool:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            self._file.touch()
            descriptor = _locked(self._file)
            if descriptor is None and self._file.exists():
                return False
            if descriptor is not None:
                if _is_at(descriptor, self._file):
                    self._descriptor = descriptor
                    return True
                os.close(descriptor)  # of a file that its owner has removed in between

    def release(self) -> None:
        """Give the path back, when the checkpoint is there or is not going to be."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            self._file.unlink(missing_ok=True)
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


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
    for path in sorted(parent.glob(f"{_PREFIX}*{_CLAIM_SUFFIX}")):
        descriptor = _locked(path, needs_lock=True) if _is_old(path) else None
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)
    for path in sorted(parent.glob(f"{_PREFIX}*{_SUFFIX}")):
        descriptor = _locked(path, needs_lock=True) if path.is_dir() and not path.is_symlink() else None
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)
            removed.append(path)
    return removed


def _is_old(claim: Path) -> bool:
    """Return whether a claim may be a leftover; a new one is not to be locked by others than its owner."""
    status = claim.lstat()
    return stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > _LEFTOVER_SECONDS


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
    """Yield where to write a file, which gets its own path when the block has ended well.

    What is left where the process is killed in the block is for :func:`remove_leftovers`.
    """
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
