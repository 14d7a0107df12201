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
    Manifest,
    UnknownVersionError,
    checksum,
    checksum_of_block,
    damaged_error,
    num_blocks,
    parse_json,
)
from dstrat.checkpoint.portable.index import TensorEntry, index_from_json
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.format import FileRecord
    from dstrat.checkpoint.portable.storage import InputFile


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
        self._scratch = threading.local()
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
        # Only whole blocks have checksums.  They are read straight into the view; the rest goes through a buffer.
        done = 0
        while done < len(view):
            block, offset = divmod(begin + done, BLOCK)
            rest = view[done:]
            if self._verified[block]:
                chunk = rest[: self._end_of_verified(block) - begin - done]
                self._read(chunk, begin + done)
            elif offset == 0 and len(rest) >= self._size_of(block):
                chunk = rest[: self._size_of(block)]
                self._read(chunk, begin + done)
                self._verify(chunk, block)
            else:
                chunk = rest[: BLOCK - offset]
                chunk[:] = self._block(block)[offset : offset + len(chunk)]
            done += len(chunk)

    def _size_of(self, block: int) -> int:
        return min(BLOCK, self._record.size - block * BLOCK)

    def _end_of_verified(self, block: int) -> int:
        """Return the position at which the run of verified blocks around a block ends."""
        end = self._verified.find(0, block)
        return (end if end >= 0 else len(self._verified)) * BLOCK

    def _block(self, block: int) -> memoryview:
        """Return a verified block, in a buffer of this thread that the next call overwrites."""
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
        if checksum(view) != checksum_of_block(self._record.checksums, block):
            raise self._damaged(f"has wrong bytes between {block * BLOCK} and {block * BLOCK + len(view)}")
        self._verified[block] = 1  # without a lock: two threads would verify the block twice, which does no harm

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
        while done < file.size and (count := file.read_into(data[done:], done)):
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
