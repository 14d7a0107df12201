"""Reader of a checkpoint folder that trusts none of its files."""

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
    checksum,
    damaged_error,
    expected,
    num_blocks,
    parse_json,
)
from dstrat.checkpoint.portable.index import TensorEntry, index_from_json
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from dstrat.checkpoint.paths import Place
    from dstrat.checkpoint.portable.format import FileRecord
    from dstrat.checkpoint.portable.storage import ReadFile


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
        return damaged_error(self._path.parent, f"{self._path.name} {what}")


def _opened(path: Place) -> ReadFile:
    try:
        return storage_of(path).open_file(path)
    except FileNotFoundError as error:
        raise damaged_error(path.parent, f"{path.name}: no such file or directory") from error


# A checkpoint that is there, opened without trusting it; torch is not needed to look at one.


class CheckpointReader:
    """A checkpoint whose manifest was read, and whose other files are opened when they are needed.

    Args:
        path: The folder.
        verifies: Whether checksums are compared.

    Raises:
        CheckpointError: It is not there, its manifest is none, or it is of another program.
    """

    def __init__(self, path: Place, *, verifies: bool = True) -> None:
        self.path, self._verifies = path, verifies
        try:
            self.manifest = read_manifest(path)
        except CheckpointError:
            check_not_foreign(str(path))
            raise
        self._files: dict[str, OpenedFile] = {}
        self._index: dict[str, TensorEntry] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file but the manifest."""
        return {name: record.size for name, record in self.manifest.files.items()}

    def file(self, name: str) -> OpenedFile:
        """Return a file of the checkpoint."""
        if name not in self._files:
            if name not in self.manifest.files:
                raise damaged_error(self.path, f"its manifest does not list {name}")
            record = self.manifest.files[name]
            self._files[name] = OpenedFile(self.path / name, record, verifies=self._verifies)
        return self._files[name]

    def document(self, name: str) -> Any:
        """Return the content of a JSON file."""
        file = self.file(name)
        size = self.manifest.files[name].size
        if size > LARGEST_JSON:
            raise damaged_error(self.path, f"{name} has {size} bytes, and {LARGEST_JSON} is the limit")
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
        try:
            return parse_json(data)
        except ValueError as error:
            raise damaged_error(self.path, f"{name}: {error}") from error

    def index(self) -> dict[str, TensorEntry]:
        """Return the tensors, by name.

        Raises:
            CheckpointError: The index is damaged.
        """
        if self._index is None:
            try:
                self._index = index_from_json(self.document(INDEX), self.sizes)
            except ValueError as error:
                raise damaged_error(self.path, f"{INDEX}: {error}") from error
        return self._index


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or none that makes sense.
    """
    if not folder.is_dir() or not storage_of(folder).is_taken(folder / MANIFEST):
        raise CheckpointError(f"checkpoint {str(folder)!r} {_absence(folder)}")
    try:
        return Manifest.from_bytes(_content(folder))
    except ValueError as error:
        raise damaged_error(folder, f"{MANIFEST}: {error}") from error


def _content(folder: Place) -> bytes:
    file = storage_of(folder).open_file(folder / MANIFEST)
    try:
        if file.size > LARGEST_JSON:
            raise damaged_error(folder, f"{MANIFEST} has more than {LARGEST_JSON} bytes")
        data = memoryview(bytearray(file.size))
        done = 0
        while done < file.size and (count := file.read_into(data[done:], done)):
            done += count
        return bytes(data[:done])
    finally:
        file.close()


def _absence(folder: Place) -> str:
    if folder.is_dir():
        return f"is a folder without {MANIFEST}: it is no checkpoint, or one that was never completed"
    if storage_of(folder).is_taken(folder):
        return "is a file, and a folder was expected: give the path of the folder, or use TorchCheckpointIO"
    return "does not exist: check the path"
