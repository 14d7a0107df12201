"""Storage of checkpoints: local disks, and stores that fsspec supports, behind one protocol."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from dstrat.checkpoint.paths import RemotePath
from dstrat.checkpoint.portable.format import BUCKET, block_checksums
from dstrat.checkpoint.portable.local_files import (
    Claim,
    DiskFile,
    OutputFile,
    UnfinishedFolder,
    atomic_write,
    remove_folder,
    replace_file,
    write_flushed,
)
from dstrat.checkpoint.portable.memory_files import RecyclingFolder, ReusedFile, memory_root, recycle_folder
from dstrat.checkpoint.portable.remote_files import (
    RemoteFile,
    UnfinishedUpload,
    UploadClaim,
    UploadedFile,
    is_claimed,
    remove_upload,
)
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dstrat.checkpoint.paths import CheckpointPath

P = TypeVar("P")


Unfinished: TypeAlias = UnfinishedFolder | UnfinishedUpload
"""A checkpoint that is being written."""

InputFile: TypeAlias = DiskFile | RemoteFile
"""A file that several threads read."""


class Storage(Protocol[P]):
    """The file operations of checkpoints; :func:`storage_of` returns the storage of a path.

    Attributes:
        is_local: Whether the files are in a local file system, with links, locks and memory maps.
    """

    is_local: bool

    def begin_checkpoint(self, target: P, /) -> Unfinished:
        """Return a new unfinished checkpoint.

        Raises:
            CheckpointError: The target exists, or is being written.
        """

    def remove_checkpoint(self, path: P, /) -> None:
        """Remove a checkpoint; a crash meanwhile leaves no folder that could be mistaken for a complete one."""

    def write_file(self, path: P, data: bytes, /) -> None:
        """Write a small new file, and flush it."""

    def write_buckets(self, path: P, size: int, bucket: Callable[[int], list[memoryview]], /) -> list[str]:
        """Write a large new file, flush it, and return the checksums of its buckets.

        Args:
            path: Of the file, which does not exist.
            size: Bytes of the file.
            bucket: Returns the bytes of the bucket that begins at a position; called in several threads.

        Raises:
            OSError: The file cannot be written, for example because the disk is full.
        """

    def replace_file(self, path: P, data: bytes, /) -> None:
        """Write a file, replacing an existing one; atomic except on file servers."""

    def atomic_write(self, path: P, /) -> AbstractContextManager[P]:
        """Return a context that yields the path to write a file to, which gets its own path at the end of the block.

        On a file server it is not atomic: the file grows under its own path.
        """

    def write_local(self, path: P, /) -> AbstractContextManager[Path]:
        """Return a context that yields a local path to write a file to; it is copied at the end of the block."""

    def read_local(self, path: P, /) -> AbstractContextManager[Path]:
        """Return a context that yields the local path of a file, or of a temporary copy.

        Raises:
            CheckpointError: The file does not exist.
        """

    def open_file(self, path: P, /) -> InputFile:
        """Open a file for reading.

        Raises:
            CheckpointError: The file does not exist, or is not a regular file.
        """

    def read_start(self, path: P, size: int, /) -> bytes:
        """Return the first bytes of a file, at most ``size``."""

    def file_size(self, path: P, /) -> int:
        """Return the size of a file in bytes."""

    def file_sizes(self, folder: P, /) -> dict[str, int]:
        """Return the size in bytes of each regular file in a folder, by name.

        Raises:
            OSError: The path is not a folder.
        """

    def modified_ns(self, path: P, /) -> int:
        """Return the modification time of a file, in nanoseconds since the epoch."""

    def why_not_writable(self, folder: P, /) -> str | None:
        """Return the reason why files cannot be written to a folder, which may not exist yet; None if none is known."""

    def is_occupied(self, path: P, /) -> bool:
        """Return whether a path exists, or is being written."""

    def claim(self, path: P, /) -> Claim | UploadClaim:
        """Return a claim that can reserve an unused path among jobs with one folder."""


def storage_of(path: CheckpointPath) -> Storage[Any]:
    """Return the storage of a local path or URL."""
    if isinstance(path, RemotePath):
        return RemoteStorage()
    return MemoryStorage() if path.is_relative_to(memory_root()) else LocalStorage()


class LocalStorage:
    """Local file systems, including network mounts."""

    is_local = True
    begin_checkpoint = staticmethod(UnfinishedFolder)
    remove_checkpoint = staticmethod(remove_folder)
    write_file = staticmethod(write_flushed)
    replace_file = staticmethod(replace_file)
    atomic_write = staticmethod(atomic_write)
    open_file = staticmethod(DiskFile)
    is_occupied = staticmethod(os.path.lexists)
    claim = staticmethod(Claim)
    output_file: type[OutputFile] = OutputFile

    def write_buckets(self, path: Path, size: int, bucket: Callable[[int], list[memoryview]]) -> list[str]:
        with contextlib.closing(self.output_file(path, size)) as output:
            # Threads help, as system calls release the interpreter's lock.
            checksums = map_in_threads(lambda begin: output.write(bucket(begin), begin), range(0, size, BUCKET))
            output.flush()
        return checksums

    def write_local(self, path: Path) -> AbstractContextManager[Path]:
        return contextlib.nullcontext(path)

    @contextlib.contextmanager
    def read_local(self, path: Path) -> Iterator[Path]:
        if path.is_dir():
            raise CheckpointError(
                f"checkpoint {str(path)!r} is a folder, and a file was expected: give the path of the file"
            )
        if not path.exists():  # most often a typing error, so the message has the names beside it
            raise CheckpointError(f"checkpoint {str(path)!r} does not exist, and {_nearby(path)}: check the path")
        yield path

    def read_start(self, path: Path, size: int) -> bytes:
        with path.open("rb") as file:
            return file.read(size)

    def file_size(self, path: Path) -> int:
        return path.stat().st_size

    def file_sizes(self, folder: Path) -> dict[str, int]:
        # lstat, and regular files only: a link is not a file of a checkpoint, wherever it leads.
        statuses = {path.name: path.lstat() for path in folder.iterdir()}
        return {name: status.st_size for name, status in statuses.items() if stat.S_ISREG(status.st_mode)}

    def modified_ns(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def why_not_writable(self, folder: Path) -> str | None:
        # os.path.exists is False for a path in a folder without access; Path.exists raises there.
        existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)  # noqa: PTH110 - as above
        if not existing.is_dir():
            return f"{str(existing)!r} is not a folder"
        can_write = os.access(existing, os.W_OK | os.X_OK)
        return None if can_write else f"{str(existing)!r} is read-only for this process"


class MemoryStorage(LocalStorage):
    """Checkpoints in the memory of this machine, where the files of a superseded one are written over."""

    begin_checkpoint = staticmethod(RecyclingFolder)
    remove_checkpoint = staticmethod(recycle_folder)
    output_file = ReusedFile


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return "neither does its folder"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix == path.suffix)
    similar = f"{path.suffix} file" if path.suffix else "name without a suffix"
    return f"its folder holds {', '.join(names[:5]) or f'no other {similar}'}"


class RemoteStorage:
    """Stores that fsspec supports."""

    is_local = False
    begin_checkpoint = staticmethod(UnfinishedUpload)
    remove_checkpoint = staticmethod(remove_upload)
    write_file = replace_file = staticmethod(RemotePath.write_bytes)
    open_file = staticmethod(RemoteFile)
    file_size = staticmethod(RemotePath.size)
    file_sizes = staticmethod(RemotePath.file_sizes)
    modified_ns = staticmethod(RemotePath.modified_ns)
    claim = staticmethod(UploadClaim)

    def write_buckets(self, path: RemotePath, size: int, bucket: Callable[[int], list[memoryview]]) -> list[str]:
        # In order, in one thread: stores have no writes at a position.
        checksums = []
        with UploadedFile(path, size) as output:
            for begin in range(0, size, BUCKET):
                views = bucket(begin)
                output.write(views)
                checksums.append(block_checksums(views))
        return checksums

    def atomic_write(self, path: RemotePath) -> AbstractContextManager[RemotePath]:
        return contextlib.nullcontext(path)

    @contextlib.contextmanager
    def write_local(self, path: RemotePath) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dstrat-") as folder:
            yield Path(folder, path.name)
            path.upload(Path(folder, path.name))

    @contextlib.contextmanager
    def read_local(self, path: RemotePath) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dstrat-") as folder:
            try:
                path.download(Path(folder, path.name))
            except FileNotFoundError as error:
                raise CheckpointError(f"checkpoint {str(path)!r} does not exist: check the path") from error
            yield Path(folder, path.name)

    def read_start(self, path: RemotePath, size: int) -> bytes:
        return path.read_bytes(0, size)

    def why_not_writable(self, folder: RemotePath) -> str | None:  # noqa: ARG002 - known only when a file is written
        return None

    def is_occupied(self, path: RemotePath) -> bool:
        return path.exists() or is_claimed(path)


# Threads of reads and writes


_NUM_THREADS = 4
Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the function's results for some items; the first error stops all threads and is raised."""
    # Not an executor: it refuses work once the interpreter exits, while the last checkpoint may still be written.
    results: dict[int, Result] = {}
    failures: list[BaseException] = []
    numbered = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        while not failures:
            with lock:
                number, item = next(numbered, (-1, None))
            if number < 0:
                return
            try:
                results[number] = function(item)  # type: ignore[arg-type]  # None comes with -1 only
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(_NUM_THREADS, len(items)) - 1)]  # and this one
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(items))]
