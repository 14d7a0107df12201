"""Reader of a checkpoint folder, which validates everything before use; needs no torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.foreign import check_not_foreign
from dstrat.checkpoint.portable.format import (
    BLOCK,
    INDEX,
    LARGEST_JSON,
    MANIFEST,
    BlockChecksum,
    Manifest,
    UnknownVersionError,
    checksum_of_block,
    damaged_error,
    num_blocks,
    parse_json,
)
from dstrat.checkpoint.portable.index import TensorEntry, index_from_json
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.format import FileRecord
    from dstrat.checkpoint.portable.storage import InputFile


_MOST_VIEWS = 1024
"""Views that the system fills in one call: IOV_MAX of Linux and macOS."""

_SMALL = 64 * 1024
"""Bytes of a view, below which many of them are read through a buffer."""


class VerifiedFile:
    """A file whose blocks are verified on their first read.

    Args:
        path: Of the file.
        record: Size and checksums from the manifest.
        verifies: Whether checksums are verified.

    Raises:
        CheckpointError: The file does not exist, is not a regular file, or has another size than its record.
    """

    def __init__(self, path: CheckpointPath, record: FileRecord, *, verifies: bool) -> None:
        self._path, self._record = path, record
        try:
            self._file: InputFile = storage_of(path).open_file(path)
        except FileNotFoundError as error:
            raise damaged_error(path.parent, f"{path.name}: no such file or directory") from error
        self._verified = bytearray(b"\x00" if verifies else b"\x01") * num_blocks(record.size)
        self._buffers = threading.local()
        if self._file.size != record.size:
            self.close()
            raise self._damaged(f"has {self._file.size} bytes, and the manifest says {record.size}")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fill a view with the bytes from position ``begin`` on; may be called in several threads.

        Raises:
            CheckpointError: The checksum of a block does not match.
        """
        self.read([(begin, view)])

    def read(self, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Fill views, each with the bytes from its position on; may be called in several threads.

        Neighbors in the file are read by one call of the system, and a block that several views share is read once.

        Args:
            pieces: Positions and views, by ascending position.

        Raises:
            CheckpointError: The checksum of a block does not match.
        """
        for begin, views in self._runs(pieces):
            size = sum(map(len, views))
            if size >= len(views) * _SMALL:
                self._read(views, begin)
                self._verify(views, begin)
            else:  # one more copy costs less than a call of the checksum for each, which passes Python's lock on
                buffer = self._buffer(size)
                self._read([buffer], begin)
                self._verify([buffer], begin)
                done = 0
                for view in views:
                    view[:] = buffer[done : done + len(view)]
                    done += len(view)

    def _buffer(self, size: int) -> memoryview:
        """Return memory of this thread, which the next call returns again."""
        if len(getattr(self._buffers, "last", b"")) < size:
            self._buffers.last = memoryview(bytearray(size))
        buffer: memoryview = self._buffers.last[:size]
        return buffer

    def _runs(self, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield views of consecutive bytes, with the position of the first one.

        Only whole blocks have checksums, so views of the bytes that nobody wants complete the unverified ones.
        """
        begin = end = 0
        views: list[memoryview] = []
        for position, view in pieces:
            if not len(view):
                continue
            if views and position > end and self._is_unverified_block_of(end - 1, position):
                views.append(memoryview(bytearray(position - end)))
            elif position != end or not views:
                if views:
                    yield begin, self._completed(views, end)
                begin = position if self._verified[position // BLOCK] else position - position % BLOCK
                views = [memoryview(bytearray(position - begin))] if position > begin else []
            views.append(view)
            end = position + len(view)
        if views:
            yield begin, self._completed(views, end)

    def _is_unverified_block_of(self, one: int, other: int) -> bool:
        return one // BLOCK == other // BLOCK and not self._verified[one // BLOCK]

    def _completed(self, views: list[memoryview], end: int) -> list[memoryview]:
        """Append a view of the rest of the last block, unless that is verified."""
        last = (end - 1) // BLOCK
        end_of_block = min((last + 1) * BLOCK, self._record.size)
        if end_of_block > end and not self._verified[last]:
            views.append(memoryview(bytearray(end_of_block - end)))
        return views

    def _read(self, views: Sequence[memoryview], position: int) -> None:
        pending, index = list(views), 0
        while index < len(pending):
            try:
                count = self._file.read_into(pending[index : index + _MOST_VIEWS], position)
            except OSError as error:
                raise self._damaged(f"cannot be read: {(error.strerror or str(error)).lower()}") from error
            if count == 0:
                raise self._damaged("became shorter while it was read")
            position += count
            while index < len(pending) and count >= len(pending[index]):
                count -= len(pending[index])
                index += 1
            if count:  # the system has stopped within a view
                pending[index] = pending[index][count:]

    def _verify(self, views: Iterable[memoryview], position: int) -> None:
        """Compare the checksums of the blocks that are in consecutive views in full."""
        state = None  # of the checksum of a block, from its first byte on
        for view in views:
            done = 0
            while done < len(view):
                block, offset = divmod(position, BLOCK)
                chunk = view[done : done + BLOCK - offset]
                if offset == 0:
                    # Others have been verified before they were read without their beginning.
                    state = None if self._verified[block] else BlockChecksum()
                if state is not None:
                    state.update(chunk)
                done, position = done + len(chunk), position + len(chunk)
                is_complete = position % BLOCK == 0 or position == self._record.size
                if state is not None and is_complete:
                    if state.digest() != checksum_of_block(self._record.checksums, block):
                        raise self._damaged(f"has wrong bytes between {block * BLOCK} and {position}")
                    self._verified[block] = 1  # without a lock: two threads may verify a block, which does no harm
                    state = None

    def _damaged(self, problem: str) -> CheckpointError:
        return damaged_error(self._path.parent, f"{self._path.name} {problem}")


class CheckpointReader:
    """A checkpoint folder: its manifest, and its other files, which are opened on first use.

    Args:
        path: The folder.
        verifies: Whether checksums are verified.

    Raises:
        CheckpointError: The folder does not exist, its manifest is not valid, or another program wrote it.
    """

    def __init__(self, path: CheckpointPath, *, verifies: bool = True) -> None:
        self.path, self._verifies = path, verifies
        try:
            self.manifest = read_manifest(path)
        except CheckpointError:
            check_not_foreign(str(path))  # raises a better error for a checkpoint of another program
            raise
        self._files: dict[str, VerifiedFile] = {}
        self._index: dict[str, TensorEntry] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size in bytes of each file except the manifest."""
        return {name: record.size for name, record in self.manifest.files.items()}

    def fetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Make parts of files readable that are not in the folder; here all files are.

        Args:
            ranges: Names of files, with the positions of the first byte and after the last one.
        """

    def path_of(self, name: str) -> CheckpointPath:
        """Return the path that a file is read from."""
        return self.path / name

    def file(self, name: str) -> VerifiedFile:
        """Return a file of the checkpoint.

        Raises:
            CheckpointError: The manifest does not list it, or it does not match its record.
        """
        if name not in self._files:
            if name not in self.manifest.files:
                raise damaged_error(self.path, f"its manifest does not list {name}")
            record = self.manifest.files[name]
            self._files[name] = VerifiedFile(self.path_of(name), record, verifies=self._verifies)
        return self._files[name]

    def document(self, name: str) -> Any:
        """Return the content of a JSON file.

        Raises:
            CheckpointError: The file is damaged or too large.
        """
        file = self.file(name)
        size = self.manifest.files[name].size
        if size > LARGEST_JSON:  # a file with a hole has any size without taking space
            raise damaged_error(self.path, f"{name} has {size} bytes, and {LARGEST_JSON} is the limit")
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
        try:
            return parse_json(data)
        except ValueError as error:
            raise damaged_error(self.path, f"{name}: {error}") from error

    def index(self) -> dict[str, TensorEntry]:
        """Return the index: the entry of each tensor, by name.

        Raises:
            CheckpointError: The index is damaged.
        """
        if self._index is None:
            try:
                self._index = index_from_json(self.document(INDEX), self.sizes)
            except ValueError as error:
                raise damaged_error(self.path, f"{INDEX}: {error}") from error
        return self._index


def read_manifest(folder: CheckpointPath) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: The folder or the manifest does not exist, or the manifest is damaged.
    """
    # Not is_file: for a link, open_file has the better error.
    if not folder.is_dir() or not storage_of(folder).is_occupied(folder / MANIFEST):
        raise CheckpointError(f"checkpoint {str(folder)!r} {_why_no_manifest(folder)}")
    try:
        return Manifest.from_bytes(_read_manifest_bytes(folder))
    except UnknownVersionError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise damaged_error(folder, f"{MANIFEST}: {error}") from error


def _read_manifest_bytes(folder: CheckpointPath) -> bytes:
    file = storage_of(folder).open_file(folder / MANIFEST)
    try:
        if file.size > LARGEST_JSON:
            raise damaged_error(folder, f"{MANIFEST} has more than {LARGEST_JSON} bytes")
        data = memoryview(bytearray(file.size))
        done = 0
        # A file that became shorter ends the loop too, and its manifest is refused.
        while done < file.size and (count := file.read_into([data[done:]], done)):
            done += count
        return bytes(data[:done])
    finally:
        file.close()


def _why_no_manifest(folder: CheckpointPath) -> str:
    if folder.is_dir():
        return f"is a folder without {MANIFEST}: it is no checkpoint, or one that was never completed"
    if storage_of(folder).is_occupied(folder):
        return "is a file, and a folder was expected: give the path of the folder, or use TorchCheckpointIO"
    return "does not exist: check the path"
