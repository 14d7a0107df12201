"""Writes to stores, which have neither renames nor locks: a checkpoint is complete with its manifest."""
# The manifest is written last.  A truncated one, which a file server may have after a crash, fails its checksum.

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import BUCKET, MANIFEST
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from dstrat.checkpoint.paths import RemotePath

_PREFIX, _SUFFIX = ".dstrat-", ".writing"
_STALE_NS = 24 * 3600 * 10**9
"""Age after which a claim is stale."""
_MAX_CHUNKS = 9000
"""Chunks of a multipart upload; the limit of S3 is 10,000."""


class UnfinishedUpload:
    """A folder of a store that is not a checkpoint until :meth:`commit`.

    A claim, an object beside the folder, reserves it.  Only one process can create the claim, so that two writers never
    mix their files; a claim older than a day is stale: its writer has crashed.

    Args:
        target: The folder, which does not exist.

    Raises:
        CheckpointError: The folder exists, or is being written.
    """

    moved_to: None = None  # a store cannot move what is at the target

    def __init__(self, target: RemotePath) -> None:
        self.path, self._claim = target, _claim(target)
        self._is_to_be_removed = False
        remove_stale_uploads(target.parent)  # first: a stale claim of this very folder would refuse it for ever
        try:
            self._claim.create(b"")
        except FileExistsError as error:
            if not _is_of_this_process(self._claim):
                raise _occupied_error(target) from error
            self._claim.write_bytes(b"")  # a second writer of this process is refused
        try:
            _check_free(target)  # after the claim: another writer may have finished just before it
        except BaseException:
            self.close()
            raise
        self._is_to_be_removed = True

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, which completes the checkpoint."""
        try:
            (self.path / MANIFEST).create(manifest)
        except FileExistsError as error:
            self._is_to_be_removed = False  # the folder is another writer's
            raise _exists_error(self.path) from error
        self._is_to_be_removed = False

    def close(self) -> None:
        """Remove the claim, and the files unless they were committed."""
        with contextlib.suppress(CheckpointError):  # the store fails: a later save removes the stale upload
            if self._is_to_be_removed:
                self.path.remove_below()
            # Last: without the claim another writer may begin in the folder.
            self._claim.unlink(missing_ok=True)


class UploadClaim:
    """A reservation of an unused path in a store, so that no other job chooses it before the checkpoint is written.

    It is the claim of the folder, with a mark of this process until the upload begins.

    Args:
        path: Of the checkpoint to be written.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path, self._claim = path, _claim(path)

    def take(self) -> bool:
        """Reserve the path; return False if another process has reserved it, or something is there."""
        try:
            self._claim.create(_process_mark())
        except FileExistsError:
            return False
        except CheckpointError:  # the store fails: the save that follows raises a better error
            return True
        if self._path.exists():  # another job has finished its save meanwhile
            self.release()
            return False
        return True

    def release(self) -> None:
        """Release the path, after the save has succeeded or failed."""
        with contextlib.suppress(CheckpointError):
            if _is_of_this_process(
                self._claim
            ):  # the end of the upload has removed it, and it may be another process's
                self._claim.unlink(missing_ok=True)


class UploadedFile:
    """A new file of a store, written from its beginning to its end; discarded if the block raises.

    Args:
        path: Of the file, which does not exist.
        size: Of the file in bytes, which determines the size of chunks.
    """

    def __init__(self, path: RemotePath, size: int) -> None:
        self._file: Any = path.open_writer(max(BUCKET, -(-size // _MAX_CHUNKS)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._file.close()
            return
        self._file.discard()
        with contextlib.suppress(AttributeError):  # read-only in files of fsspec's memory store
            self._file.closed = True  # or its finalizer would upload it after all

    def write(self, views: Sequence[memoryview]) -> None:
        """Append bytes."""
        for view in views:
            self._file.write(view)


class RemoteFile:
    """A file of a store that several threads read in any order.

    Args:
        path: Of the file.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._last = threading.local()  # each thread caches its last bucket, which mostly has the next bytes too
        self.size = path.size()

    def close(self) -> None:
        """Do nothing: no connection is open between reads."""

    def read_into(self, views: Sequence[memoryview], position: int) -> int:
        """Read from a position into views, and return the number of bytes; 0 at the end of the file."""
        done = 0
        for view in views:
            filled = 0
            while filled < len(view):
                count = self._read(view[filled:], position + done)
                if count == 0:
                    return done
                filled, done = filled + count, done + count
        return done

    def _read(self, view: memoryview, position: int) -> int:
        begin = position - position % BUCKET
        if getattr(self._last, "begin", None) != begin:
            self._last.data = self._path.read_bytes(begin, min(begin + BUCKET, self.size))
            self._last.begin = begin
        data = memoryview(self._last.data)[position - begin :][: len(view)]
        view[: len(data)] = data
        return len(data)


def is_claimed(target: RemotePath) -> bool:
    """Return whether a folder has a claim, of a running writer or a stale one."""
    return _claim(target).exists()


def remove_upload(path: RemotePath) -> None:
    """Remove a checkpoint."""
    claim = _claim(path)
    claim.write_bytes(b"")  # so that nobody begins to write in the folder, and a crash leaves a stale upload
    (path / MANIFEST).unlink(missing_ok=True)  # first: without it the folder is not a checkpoint
    path.remove_below()
    claim.unlink(missing_ok=True)


def remove_stale_uploads(parent: RemotePath) -> None:
    """Remove the stale uploads of crashed writers in a folder."""
    for name in parent.file_sizes():
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        claim, path = parent / name, parent / name[len(_PREFIX) : -len(_SUFFIX)]
        try:
            if time.time_ns() - claim.modified_ns() < _STALE_NS:
                continue
        except (CheckpointError, FileNotFoundError):  # the store has no times, or the writer has just finished
            continue
        if not (path / MANIFEST).exists():  # with one, the writer has crashed between its manifest and this claim
            path.remove_below()
        claim.unlink(missing_ok=True)


_MARK = secrets.token_hex(16)


def _process_mark() -> bytes:
    return f"{_MARK}-{os.getpid()}".encode()  # forked processes share the first part


def _is_of_this_process(claim: RemotePath) -> bool:
    mark = _process_mark()
    try:
        # By its size first: a store has no range of bytes in the empty claim of a running upload.
        return claim.size() == len(mark) and claim.read_bytes() == mark
    except FileNotFoundError:
        return False


def _claim(target: RemotePath) -> RemotePath:
    return target.parent / f"{_PREFIX}{target.name}{_SUFFIX}"


def _check_free(target: RemotePath) -> None:
    if target.exists():
        raise _exists_error(target)


def _occupied_error(target: RemotePath) -> CheckpointError:
    if (target / MANIFEST).exists() or not is_claimed(target):
        return _exists_error(target)
    return CheckpointError(
        f"checkpoint {str(target)!r} is being written, or was left by a crash less than a day ago: choose another "
        "path, or remove it first"
    )


def _exists_error(target: RemotePath) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(target)!r} exists already, and none is ever written over: choose another path, or remove it "
        "first"
    )
