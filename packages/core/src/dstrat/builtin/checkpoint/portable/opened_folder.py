"""A checkpoint that is there, opened without trusting it; torch is not needed to look at one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.foreign import check_not_foreign
from dstrat.builtin.checkpoint.portable.damage import damaged
from dstrat.builtin.checkpoint.portable.index import TensorEntry, index_from_json
from dstrat.builtin.checkpoint.portable.layout import INDEX, LARGEST_JSON, MANIFEST
from dstrat.builtin.checkpoint.portable.manifest import Manifest
from dstrat.builtin.checkpoint.portable.opened import OpenedFile
from dstrat.builtin.checkpoint.portable.storage import is_taken, open_file
from dstrat.builtin.checkpoint.portable.strict_json import parse_json
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

    from dstrat.builtin.checkpoint.place import Place


class OpenedFolder:
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
                raise damaged(self.path, f"its manifest does not list {name}")
            record = self.manifest.files[name]
            self._files[name] = OpenedFile(self.path / name, record, verifies=self._verifies)
        return self._files[name]

    def document(self, name: str) -> Any:
        """Return the content of a JSON file."""
        file = self.file(name)
        size = self.manifest.files[name].size
        if size > LARGEST_JSON:
            raise damaged(self.path, f"{name} has {size} bytes, and {LARGEST_JSON} is the limit")
        data = bytearray(size)
        file.read_into(memoryview(data), 0)
        try:
            return parse_json(data)
        except ValueError as error:
            raise damaged(self.path, f"{name}: {error}") from error

    def index(self) -> dict[str, TensorEntry]:
        """Return the tensors, by name.

        Raises:
            CheckpointError: The index is damaged.
        """
        if self._index is None:
            try:
                self._index = index_from_json(self.document(INDEX), self.sizes)
            except ValueError as error:
                raise damaged(self.path, f"{INDEX}: {error}") from error
        return self._index


def read_manifest(folder: Place) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, or none that makes sense.
    """
    if not folder.is_dir() or not is_taken(folder / MANIFEST):
        raise CheckpointError(f"checkpoint {str(folder)!r} {_absence(folder)}")
    try:
        return Manifest.from_bytes(_content(folder))
    except ValueError as error:
        raise damaged(folder, f"{MANIFEST}: {error}") from error


def _content(folder: Place) -> bytes:
    file = open_file(folder / MANIFEST)
    try:
        if file.size > LARGEST_JSON:
            raise damaged(folder, f"{MANIFEST} has more than {LARGEST_JSON} bytes")
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
    if is_taken(folder):
        return "is a file, and a folder was expected: give the path of the folder, or use TorchCheckpointIO"
    return "does not exist: check the path"
