"""Atomic writes of folders and files on a disk, with locks against other jobs; direct input and output."""

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

from dstrat.checkpoint.portable.format import BUCKET, MANIFEST, block_checksums, damaged_error
from dstrat.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


_PREFIX, _SUFFIX, _CLAIM_SUFFIX = ".dstrat-", ".tmp", ".claim"
_STALE_SECONDS = 3600
"""Age after which a claim may be stale."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link is refused, a pipe does not block


class UnfinishedFolder:
    """A temporary folder beside its target, invisible to readers until :meth:`commit`.

    Its writer holds a lock on it, which the system releases when the process ends for any reason.  So a folder with
    such a name but no lock is stale: its writer has crashed.

    Args:
        target: The final path.
        moves_existing: Whether the commit moves what is at the target beside it.

    Attributes:
        moved_to: Where the commit has moved what was at the target; None if nothing was there.

    Raises:
        CheckpointError: The target exists.
        OSError: The folder cannot be created.
    """

    moved_to: Path | None = None

    def __init__(self, target: Path, *, moves_existing: bool = False) -> None:
        self._moves_existing = moves_existing
        if not moves_existing:
            check_free(target)  # now, before the ranks write for nothing
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target.parent)
        self.target = target
        self.path, self._lock = _create_locked(target.parent)

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, and rename the folder, whose other files are flushed already, to its target."""
        if not self._moves_existing:
            check_free(self.target)  # again: rename would replace an empty folder that appeared meanwhile
        write_flushed(self.path / MANIFEST, manifest)
        # Before the rename, or a power failure could leave the final name with missing files.
        flush_folder(self.path)
        if self._moves_existing and os.path.lexists(self.target):
            # Only now: until the new checkpoint is complete, the old one is what a restart looks for.
            self.moved_to = unused_beside(self.target)
            self.target.rename(self.moved_to)
        self.path.rename(self.target)
        # After it, or a power failure could undo the rename, while older checkpoints are removed already.
        flush_folder(self.target.parent)

    def close(self) -> None:
        """Remove the folder unless it was committed, and release the lock."""
        shutil.rmtree(self.path, ignore_errors=True)  # after a commit there is nothing of this name
        os.close(self._lock)


class Claim:
    """A reservation of an unused path, so that no other job chooses it before the checkpoint is written.

    It is a locked file beside the path; the system releases the lock when the process ends for any reason.  On a file
    system without locks it reserves nothing.

    Args:
        path: Of the checkpoint to be written.
    """

    def __init__(self, path: Path) -> None:
        # A digest: a checkpoint's name may have the maximal length already, without room for a prefix.
        self._path = path
        name = hashlib.sha256(path.name.encode(errors="surrogateescape")).hexdigest()[:16]
        self._file = path.with_name(f"{_PREFIX}{name}{_CLAIM_SUFFIX}")
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Reserve the path; return False if another process has reserved it, or something is there."""
        try:
            is_reserved = self._take()
        except OSError:  # no access, or a full disk: the save that follows raises a better error
            return True
        if is_reserved and os.path.lexists(self._path):  # another job has finished its save meanwhile
            self.release()
            return False
        return is_reserved

    def _take(self) -> bool:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            # Neither through a link nor into a pipe: others can compute the name, and may write to a shared folder.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self._file, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666))
            descriptor = _locked(self._file)
            if descriptor is None and os.path.lexists(self._file):
                return False
            if descriptor is not None:
                if is_at(descriptor, self._file):
                    self._descriptor = descriptor
                    return True
                os.close(descriptor)  # its owner has removed the file in between: try again with a new one

    def release(self) -> None:
        """Release the path, after the save has succeeded or failed."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Unlinked while it is locked: afterwards the file may be another process's.
            self._file.unlink(missing_ok=True)
            os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path is still that of an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def unused_beside(path: Path, more: str = "") -> Path:
    """Return the first unused path among ``name-v1.ckpt``, ``name-v2.ckpt`` ... beside ``name.ckpt``.

    Args:
        path: Of the checkpoint.
        more: Follows the suffix, in the name of files that belong to the checkpoint.
    """
    name, version = path.name.removesuffix(path.suffix), 1
    while os.path.lexists(other := path.with_name(f"{name}-v{version}{path.suffix}{more}")):
        version += 1
    return other


def check_free(target: Path) -> None:
    """Raise a :class:`CheckpointError` if the target exists."""
    if os.path.lexists(target):
        raise CheckpointError(
            f"checkpoint {str(target)!r} exists already, and none is ever written over: "
            "choose another path, or remove it first"
        )


def _create_locked(parent: Path) -> tuple[Path, int]:
    while True:
        path = parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        path.mkdir()
        # Until it is locked, it looks stale: remove_stale of another job may lock it first, or remove it.
        descriptor = _locked(path)
        if descriptor is not None and path.exists():
            return path, descriptor
        if descriptor is not None:
            os.close(descriptor)


def _locked(path: Path, *, needs_lock: bool = False) -> int | None:
    """Lock a file or folder, and return its descriptor; None if another process holds the lock, or it does not exist.

    Args:
        path: Of the file or folder.
        needs_lock: Whether the result is None, too, without access and on a file system without locks; otherwise it
            is an unlocked descriptor there.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or needs_lock:
            return None
        raise
    try:
        # flock, not lockf: a POSIX lock is lost when the process closes any descriptor of the same file.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError) or needs_lock:
            os.close(descriptor)
            return None
    return descriptor


def remove_stale(parent: Path, *, claims_of_any_age: bool = False) -> list[Path]:
    """Remove the stale files and folders of crashed writers in a folder, and return the folders.

    Args:
        parent: The folder.
        claims_of_any_age: Whether claims without an owner are removed at once, after a crash.  One that another job is
            making at this moment may be among them: that job then chooses the next name.
    """
    removed = []
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        is_claim = path.suffix == _CLAIM_SUFFIX and _may_be_stale(path, 0 if claims_of_any_age else _STALE_SECONDS)
        is_folder = path.suffix == _SUFFIX and path.is_dir() and not path.is_symlink()
        # needs_lock: without locks a stale folder cannot be told from one that is being written.
        descriptor = _locked(path, needs_lock=True) if is_claim or is_folder else None
        if descriptor is None:
            continue
        if is_claim:
            with contextlib.suppress(OSError):  # another user's, in a folder like /tmp
                path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        os.close(descriptor)
    return removed


def _may_be_stale(claim: Path, seconds: float) -> bool:
    """Return whether a claim is old; locking a new one could make its owner's attempt fail."""
    try:
        status = claim.lstat()
    except FileNotFoundError:  # its owner has released it since the folder was listed
        return False
    return stat.S_ISREG(status.st_mode) and (not seconds or time.time() - status.st_mtime > seconds)


def flush_folder(folder: Path) -> None:
    """Flush a folder, which makes creations, renames and removals in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a new file, and flush it to the disk."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically, or write a new one."""
    with atomic_write(path) as temporary:
        write_flushed(temporary, data)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file to, which is renamed to its own path at the end of the block.

    The block flushes what it writes, or the rename may reach the disk before the content.  If the process is killed in
    the block, :func:`remove_stale` removes the temporary folder.
    """
    # In a folder, so that remove_stale has one kind of unfinished writes to recognize.
    folder, lock = _create_locked(path.parent)
    temporary = folder / path.name
    try:
        yield temporary
        temporary.replace(path)
        flush_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint's folder."""
    # Renamed first: a crash meanwhile leaves a stale temporary folder, and not a damaged checkpoint.
    temporary = path.parent / f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
    path.rename(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


# Input: regular files only, as a checkpoint from elsewhere may contain links or pipes


_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK, errno.ENXIO)
"""Errors that mean that there is no regular file; others, of the disk or the permissions, may be temporary."""


class DiskFile:
    """A file that several threads read in any order.

    Args:
        path: Of the file.

    Raises:
        CheckpointError: The file does not exist, or is not a regular file.
        StoreError: The disk fails, or access is denied.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = _open_regular(path)
        self.size = os.fstat(self._descriptor).st_size
        if hasattr(os, "posix_fadvise"):  # not on macOS
            # Else the threads look like random access to the system, which reads ahead half as fast.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read_into(self, views: Sequence[memoryview], position: int) -> int:
        """Read from a position into views, and return the number of bytes; 0 at the end of the file."""
        return os.preadv(self._descriptor, views, position)


def _open_regular(path: Path) -> int:
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        reason = "is a link, and a checkpoint has none" if path.is_symlink() else (error.strerror or str(error)).lower()
        if error.errno in _DAMAGE:
            raise damaged_error(path.parent, f"{path.name}: {reason}") from error
        raise StoreError(f"{str(path)!r} cannot be read: {reason}") from error
    # Of the open file, which is the one that is read; the path may be another one's by now.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged_error(path.parent, f"{path.name} is no regular file")
    return descriptor


# Output in several threads, with direct I/O if the file system supports it


_PAGE = 4096
_NOT_ALIGNED = (errno.EINVAL, errno.ENOTSUP)


class OutputFile:
    """A new file that several threads write, in buckets at multiples of the bucket size.

    Direct I/O leaves the page cache to other files, needs one bucket of memory per thread only, and is faster when
    several threads write one file.

    Args:
        path: Of the file, which does not exist.
        size: Of the file in bytes.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # A second descriptor, since not every write can be direct, and O_DIRECT is a flag of the descriptor.
        self._direct = _open_direct(path) if size >= BUCKET else None
        self._threads = threading.local()

    def close(self) -> None:
        """Close the file, whether it is complete or not."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)

    def write(self, views: Sequence[memoryview], position: int) -> str:
        """Write a bucket, and return its checksums.

        Raises:
            OSError: The bucket cannot be written, for example because the disk is full.
        """
        if self._direct is None or not self._write_directly(self._direct, views, position):
            for view in views:
                _write_all(self._cached, view, position)
                position += len(view)
        return block_checksums(views)

    def flush(self) -> None:
        """Truncate the file to its size, and flush it to the disk."""
        os.ftruncate(self._cached, self._size)  # direct I/O writes full pages, also at the end
        os.fsync(self._cached)  # of the file, by whichever descriptor it was written

    def _write_directly(self, descriptor: int, views: Sequence[memoryview], position: int) -> bool:
        """Write a bucket with direct I/O; return False if the file system refuses it."""
        # Direct I/O needs page-aligned memory, which mmap returns.
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
        if written < filled:  # a nearly full disk; direct I/O cannot go on within a page
            _write_all(self._cached, bucket[written:filled], position + written)
        return True


def _open_direct(path: Path) -> int | None:
    with contextlib.suppress(OSError):  # some file systems, such as tmpfs, have no direct I/O
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC) if hasattr(os, "O_DIRECT") else None
    return None


def _write_all(descriptor: int, view: memoryview, position: int) -> None:
    """Write all bytes of a view at a position."""
    done = 0
    while done < len(view):  # a nearly full disk writes fewer bytes, and raises in the next call
        done += os.pwrite(descriptor, view[done:], position + done)
