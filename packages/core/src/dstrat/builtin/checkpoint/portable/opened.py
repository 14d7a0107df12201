"""A file of a checkpoint, read without trusting it: of the size and with the checksums listed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.checksum import checksum, expected, num_blocks
from dstrat.builtin.checkpoint.portable.damage import damaged
from dstrat.builtin.checkpoint.portable.layout import BLOCK
from dstrat.builtin.checkpoint.portable.storage import open_file

if TYPE_CHECKING:
    from dstrat.builtin.checkpoint.place import Place
    from dstrat.builtin.checkpoint.portable.manifest import FileRecord
    from dstrat.builtin.checkpoint.portable.storage import ReadFile
    from dstrat.errors import CheckpointError


class OpenedFile:
    """A file whose blocks are verified when they are read, each once.

    Args:
        path: Where it is.
        record: What the manifest says of it.
        verifies: Whether checksums are compared.

    Raises:
        CheckpointError: It is not there, no regular file, or of another size.
    """

    def __init__(self, path: Place, record: FileRecord, *, verifies: bool) -> None:
        self._path, self._record = path, record
        self._file = _opened(path)
        self._verified = bytearray(b"\x00" if verifies else b"\x01") * num_blocks(record.size)
        self._scratch = threading.local()
        if self._file.size != record.size:
            self.close()
            raise self._damaged(f"has {self._file.size} bytes, and the manifest says {record.size}")

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fill a view with the bytes from a position on; may be called in several threads.

        Raises:
            CheckpointError: A block that they are in is not what it was when it was written.
        """
        done = 0
        while done < len(view):
            block, offset = divmod(begin + done, BLOCK)
            rest = view[done:]
            if self._verified[block]:
                part = rest[: self._end_of_verified(block) - begin - done]
                self._read(part, begin + done)
            elif offset == 0 and len(rest) >= self._size_of(block):
                part = rest[: self._size_of(block)]
                self._read(part, begin + done)
                self._verify(part, block)
            else:
                part = rest[: BLOCK - offset]
                part[:] = self._block(block)[offset : offset + len(part)]
            done += len(part)

    def _size_of(self, block: int) -> int:
        return min(BLOCK, self._record.size - block * BLOCK)

    def _end_of_verified(self, block: int) -> int:
        """Return where the run of verified blocks ends that a block is in."""
        end = self._verified.find(0, block)
        return (end if end >= 0 else len(self._verified)) * BLOCK

    def _block(self, block: int) -> memoryview:
        """Return a whole block, verified, in a buffer of this thread."""
        if not hasattr(self._scratch, "buffer"):
            self._scratch.buffer = memoryview(bytearray(BLOCK))
        view: memoryview = self._scratch.buffer[: self._size_of(block)]
        self._read(view, block * BLOCK)
        self._verify(view, block)
        return view

    def _read(self, view: memoryview, position: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = self._file.read_into(view[done:], position + done)
            except OSError as error:
                raise self._damaged(f"cannot be read: {(error.strerror or str(error)).lower()}") from error
            if count == 0:
                raise self._damaged("became shorter while it was read")
            done += count

    def _verify(self, view: memoryview, block: int) -> None:
        if checksum(view) != expected(self._record.checksums, block):
            raise self._damaged(f"has wrong bytes between {block * BLOCK} and {block * BLOCK + len(view)}")
        self._verified[block] = 1

    def _damaged(self, what: str) -> CheckpointError:
        return damaged(self._path.parent, f"{self._path.name} {what}")


def _opened(path: Place) -> ReadFile:
    try:
        return open_file(path)
    except FileNotFoundError as error:
        raise damaged(path.parent, f"{path.name}: no such file or directory") from error
