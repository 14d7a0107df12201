"""A regular file of this machine, opened without trusting what is there."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.damage import damaged
from dstrat.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

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
            raise damaged(path.parent, f"{path.name}: {what}") from error
        raise StoreError(f"{str(path)!r} cannot be read: {what}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged(path.parent, f"{path.name} is no regular file")
    return descriptor
