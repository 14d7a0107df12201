"""Folders on a disk that are complete or absent: temporary names, locks, buffered output."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import shutil
import stat
import threading
import time
from typing import TYPE_CHECKING

from dstrat.checkpoint.portable.format import BUCKET, MANIFEST, damaged_error
from dstrat.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from typing_extensions import Self


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


# A regular file of this machine, opened without trusting what is there.


_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link is refused, a pipe does not wait
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""What the system says where there is no regular file; anything else may be over when it is read again."""


class DiskFile:
    """A file that is read in any order by several threads.

    Args:
        path: Where it is.

    Raises:
        CheckpointError: It is not there, or is a link, a pipe or the like.
        StoreError: The disk fails, or the file may not be read.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def close(self) -> None:
        """Close it."""
        os.close(self._descriptor)

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill the beginning of a view with the bytes from a position on; return how many, 0 at the end."""
        return os.preadv(self._descriptor, [view], position)


def _open_regular(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        what = "is a link, and a checkpoint has none" if path.is_symlink() else (error.strerror or str(error)).lower()
        if error.errno in _DAMAGE:
            raise damaged_error(path.parent, f"{path.name}: {what}") from error
        raise StoreError(f"{str(path)!r} cannot be read: {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged_error(path.parent, f"{path.name} is no regular file")
    return descriptor


# A new file that several threads fill, past the system's cache where the file system allows it.


_PAGE = 4096
_NOT_ALIGNED = (errno.EINVAL, errno.ENOTSUP)


class OutputFile:
    """A file that is written once, in buckets at any positions that are multiples of a bucket.

    Writing directly from memory to the disk leaves the cache to those who need it, takes no memory but one bucket for
    each thread, and is faster where several threads write to one file.

    Args:
        path: Where there is nothing yet.
        size: Bytes that it will have.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._direct = _open_direct(path) if size >= BUCKET else None
        self._threads = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, views: Sequence[memoryview], position: int) -> None:
        """Write a bucket.

        Raises:
            OSError: The disk is full, or the like.
        """
        if self._direct is not None and self._write_directly(self._direct, views, position):
            return
        for view in views:
            _write_all(self._cached, view, position)
            position += len(view)

    def flush(self) -> None:
        """Give the file its size, and let all of it reach the disk."""
        os.ftruncate(self._cached, self._size)  # the last page that was written directly is a whole one
        os.fsync(self._cached)

    def _write_directly(self, descriptor: int, views: Sequence[memoryview], position: int) -> bool:
        """Write what is copied to aligned memory; return whether the file system could."""
        if not hasattr(self._threads, "bucket"):
            self._threads.bucket = memoryview(mmap.mmap(-1, BUCKET))
        bucket, filled = self._threads.bucket, 0
        for view in views:
            bucket[filled : filled + len(view)] = view
            filled += len(view)
        pages = bucket[: -(-filled // _PAGE) * _PAGE]
        try:
            written = os.pwrite(descriptor, pages, position)
        except OSError as error:
            if error.errno in _NOT_ALIGNED:
                return False
            raise
        if written < filled:
            _write_all(self._cached, bucket[written:filled], position + written)
        return True


def _open_direct(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # not every file system can
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC) if hasattr(os, "O_DIRECT") else None
    return None


def _write_all(descriptor: int, view: memoryview, position: int) -> None:
    done = 0
    while done < len(view):  # a disk that is nearly full takes a part, and says why with the next call
        done += os.pwrite(descriptor, view[done:], position + done)
