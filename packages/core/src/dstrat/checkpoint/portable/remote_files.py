"""Checkpoints in a store, which has neither renames nor locks: complete with the manifest, written last.

A part of a manifest, as a file server may have after a crash, is none: it cannot be read.
"""

from __future__ import annotations

import contextlib
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
_LEFTOVER_NS = 24 * 3600 * 10**9
"""Age of a claim from which on nobody can be writing there any more."""
_MOST_PARTS = 9000
"""Parts of one upload; S3 takes 10000."""


class UnfinishedUpload:
    """A folder of a store that is no checkpoint until :meth:`commit`.

    A claim, an object beside it, says that somebody writes there.  The store lets one process create it, so two
    writers never mix their files; a claim older than a day is a leftover of a crash.

    Args:
        target: Where nothing is.

    Raises:
        CheckpointError: Something is there, or is being written.
    """

    def __init__(self, target: RemotePath) -> None:
        self.path, self._claim = target, _claim(target)
        self._is_to_be_removed = False
        remove_left_uploads(target.parent)
        try:
            self._claim.create(b"")
        except FileExistsError as error:
            raise _taken(target) from error
        try:
            _check_free(target)  # with the claim, as another writer may have come to its end until then
        except BaseException:
            self.close()
            raise
        self._is_to_be_removed = True

    def commit(self, manifest: bytes) -> None:
        """Write the manifest, and so make the checkpoint complete."""
        try:
            (self.path / MANIFEST).create(manifest)
        except FileExistsError as error:
            self._is_to_be_removed = False  # it is another writer's
            raise _exists(self.path) from error
        self._is_to_be_removed = False

    def close(self) -> None:
        """Remove the claim, and what was written where it was not committed."""
        with contextlib.suppress(CheckpointError):  # it is a leftover then
            if self._is_to_be_removed:
                self.path.remove_below()
            self._claim.unlink(missing_ok=True)


class UploadedFile:
    """A file of a store that is written in one go, and is whole when the block has ended well.

    Args:
        path: Where nothing is.
        size: Bytes that it will have.
    """

    def __init__(self, path: RemotePath, size: int) -> None:
        self._file: Any = path.open_writer(max(BUCKET, -(-size // _MOST_PARTS)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._file.close()
            return
        self._file.discard()
        with contextlib.suppress(AttributeError):  # which files in memory raise
            self._file.closed = True  # or it would try again when it is collected

    def write(self, views: Sequence[memoryview]) -> None:
        """Write the bytes that follow."""
        for view in views:
            self._file.write(view)


class RemoteFile:
    """A file of a store, read in any order by several threads.

    Each thread keeps the bucket that it read last, as what is asked for next is mostly in it.

    Args:
        path: Where it is.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._last = threading.local()
        self.size = path.size()

    def close(self) -> None:
        """Let go of it."""

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill the beginning of a view with the bytes from a position on; return how many, 0 at the end."""
        begin = position - position % BUCKET
        if getattr(self._last, "begin", None) != begin:
            self._last.data = self._path.read_bytes(begin, min(begin + BUCKET, self.size))
            self._last.begin = begin
        found = memoryview(self._last.data)[position - begin :][: len(view)]
        view[: len(found)] = found
        return len(found)


def is_claimed(target: RemotePath) -> bool:
    """Return whether somebody writes there, or did not come to an end with it."""
    return _claim(target).exists()


def remove_upload(path: RemotePath) -> None:
    """Remove a checkpoint, so that a crash in between leaves nothing that looks like one."""
    claim = _claim(path)
    claim.write_bytes(b"")
    (path / MANIFEST).unlink(missing_ok=True)
    path.remove_below()
    claim.unlink(missing_ok=True)


def remove_left_uploads(parent: RemotePath) -> list[RemotePath]:
    """Remove what crashed writers have left in a folder long ago, and return it."""
    removed = []
    for name in parent.file_sizes():
        if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
            continue
        claim, path = parent / name, parent / name[len(_PREFIX) : -len(_SUFFIX)]
        try:
            if time.time_ns() - claim.modified_ns() < _LEFTOVER_NS:
                continue
        except (CheckpointError, FileNotFoundError):  # a store that does not say, or the writer has just ended
            continue
        if not (path / MANIFEST).exists():
            path.remove_below()
            removed.append(path)
        claim.unlink(missing_ok=True)
    return removed


def _claim(target: RemotePath) -> RemotePath:
    return target.parent / f"{_PREFIX}{target.name}{_SUFFIX}"


def _check_free(target: RemotePath) -> None:
    if target.exists():
        raise _exists(target)


def _taken(target: RemotePath) -> CheckpointError:
    if (target / MANIFEST).exists() or not is_claimed(target):
        return _exists(target)
    return CheckpointError(
        f"checkpoint {str(target)!r} is being written, or was left by a crash less than a day ago: choose another "
        "path, or remove it first"
    )


def _exists(target: RemotePath) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(target)!r} exists already, and none is ever written over: choose another path, or remove it "
        "first"
    )
