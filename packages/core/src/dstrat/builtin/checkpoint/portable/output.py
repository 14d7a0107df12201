"""A new file that several threads fill, past the system's cache where the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.layout import BUCKET

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

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
