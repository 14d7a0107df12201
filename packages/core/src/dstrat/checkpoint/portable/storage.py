"""Storage of checkpoints: disks of this machine and stores that fsspec reaches, behind one protocol."""

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
from dstrat.checkpoint.portable.format import BUCKET, THREADS, block_checksums
from dstrat.checkpoint.portable.local_files import (
    Claim,
    DiskFile,
    OutputFile,
    UnfinishedFolder,
    remove_folder,
    replace_file,
    write_flushed,
    written_whole,
)
from dstrat.checkpoint.portable.remote_files import (
    RemoteFile,
    UnfinishedUpload,
    UploadedFile,
    is_claimed,
    remove_upload,
)
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dstrat.checkpoint.paths import Place

P = TypeVar("P")


Unfinished: TypeAlias = UnfinishedFolder | UnfinishedUpload
"""A checkpoint that is being written."""

ReadFile: TypeAlias = DiskFile | RemoteFile
"""A file that is read in several threads."""


class Storage(Protocol[P]):
    """What checkpoints need of where they are; methods take a path that :func:`storage_of` returned it for.

    Attributes:
        is_local: Whether its files are on this machine, with links, locks and memory maps.
    """

    is_local: bool

    def begin_checkpoint(self, target: P, /) -> Unfinished:
        """Return a new checkpoint to write.

        Raises:
            CheckpointError: Something is there already.
        """

    def remove_checkpoint(self, path: P, /) -> None:
        """Remove a checkpoint, so that a crash in between leaves nothing that looks like one."""

    def write_file(self, path: P, data: bytes, /) -> None:
        """Write a small new file, so that it survives a crash."""

    def write_buckets(self, path: P, size: int, bucket: Callable[[int], list[memoryview]], /) -> list[str]:
        """Write a new file so that it survives a crash, and return its checksums.

        Args:
            path: Where nothing is.
            size: Its bytes.
            bucket: Returns the bytes of the bucket that begins at a position, in any thread.

        Raises:
            OSError: The disk is full, or the like.
        """

    def replace_file(self, path: P, data: bytes, /) -> None:
        """Write a file that takes the place of an older one, at once but for stores that are file servers."""

    def write_whole(self, path: P, /) -> AbstractContextManager[P]:
        """Return a context that yields where to write a file, which is whole when the block has ended well.

        On a disk and in an object store nothing is at its path before; in a store that is a file server it grows there.
        """

    def write_local(self, path: P, /) -> AbstractContextManager[Path]:
        """Return a context that yields where to write a file on this machine, which is then copied to its path."""

    def read_local(self, path: P, /) -> AbstractContextManager[Path]:
        """Return a context that yields where a file, or a copy of it, is on this machine.

        Raises:
            CheckpointError: It is not there.
        """

    def open_file(self, path: P, /) -> ReadFile:
        """Return a file to read.

        Raises:
            CheckpointError: It is not there, or no regular file.
        """

    def read_start(self, path: P, size: int, /) -> bytes:
        """Return at most so many bytes from the beginning of a file."""

    def file_size(self, path: P, /) -> int:
        """Return the bytes of a file."""

    def file_sizes(self, folder: P, /) -> dict[str, int]:
        """Return the bytes of each regular file in a folder, by its name.

        Raises:
            OSError: It is no folder.
        """

    def modified_ns(self, path: P, /) -> int:
        """Return when a file was written, in nanoseconds since the epoch."""

    def why_not_writable(self, folder: P, /) -> str | None:
        """Return why no file can be written to a folder, which may be missing, as far as that is known before."""

    def is_taken(self, path: P, /) -> bool:
        """Return whether something is there, or is being written there."""

    def claim(self, path: P, /) -> Claim | None:
        """Return what keeps a path from other jobs that save into the same folder; None where nothing can."""


def storage_of(path: Place) -> Storage[Any]:
    """Return the storage of a path or URL."""
    return RemoteStorage() if isinstance(path, RemotePath) else LocalStorage()


class LocalStorage:
    """Disks of this machine."""

    is_local = True
    begin_checkpoint = staticmethod(UnfinishedFolder)
    remove_checkpoint = staticmethod(remove_folder)
    write_file = staticmethod(write_flushed)
    replace_file = staticmethod(replace_file)
    write_whole = staticmethod(written_whole)
    open_file = staticmethod(DiskFile)
    is_taken = staticmethod(os.path.lexists)
    claim = staticmethod(Claim)

    def write_buckets(self, path: Path, size: int, bucket: Callable[[int], list[memoryview]]) -> list[str]:
        def write(begin: int) -> str:
            views = bucket(begin)
            output.write(views, begin)
            return block_checksums(views)

        with OutputFile(path, size) as output:
            # zlib and the system work without the interpreter's lock.
            checksums = map_in_threads(write, range(0, size, BUCKET))
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
        if not path.exists():
            raise CheckpointError(f"checkpoint {str(path)!r} does not exist, and {_nearby(path)}: check the path")
        yield path

    def read_start(self, path: Path, size: int) -> bytes:
        with path.open("rb") as file:
            return file.read(size)

    def file_size(self, path: Path) -> int:
        return path.stat().st_size

    def file_sizes(self, folder: Path) -> dict[str, int]:
        statuses = {path.name: path.lstat() for path in folder.iterdir()}
        return {name: status.st_size for name, status in statuses.items() if stat.S_ISREG(status.st_mode)}

    def modified_ns(self, path: Path) -> int:
        return path.stat().st_mtime_ns

    def why_not_writable(self, folder: Path) -> str | None:
        # Unlike Path.exists it takes a folder that may not be looked into for missing.
        existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)  # noqa: PTH110 - as above
        if not existing.is_dir():
            return f"{str(existing)!r} is no folder"
        can_write = os.access(existing, os.W_OK | os.X_OK)
        return None if can_write else f"{str(existing)!r} is read-only for this process"


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return "neither does its folder"
    names = sorted(other.name for other in path.parent.iterdir() if other.suffix == path.suffix)
    return f"its folder holds {', '.join(names[:5]) if names else f'no other {path.suffix} file'}"


class RemoteStorage:
    """Stores that fsspec reaches."""

    is_local = False
    begin_checkpoint = staticmethod(UnfinishedUpload)
    remove_checkpoint = staticmethod(remove_upload)
    write_file = replace_file = staticmethod(RemotePath.write_bytes)
    open_file = staticmethod(RemoteFile)
    file_size = staticmethod(RemotePath.size)
    file_sizes = staticmethod(RemotePath.file_sizes)
    modified_ns = staticmethod(RemotePath.modified_ns)

    def write_buckets(self, path: RemotePath, size: int, bucket: Callable[[int], list[memoryview]]) -> list[str]:
        checksums = []
        with UploadedFile(path, size) as output:
            for begin in range(0, size, BUCKET):
                views = bucket(begin)
                output.write(views)
                checksums.append(block_checksums(views))
        return checksums

    def write_whole(self, path: RemotePath) -> AbstractContextManager[RemotePath]:
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

    def why_not_writable(self, folder: RemotePath) -> str | None:  # noqa: ARG002 - stores say it when they are written to
        return None

    def is_taken(self, path: RemotePath) -> bool:
        return path.exists() or is_claimed(path)

    def claim(self, path: RemotePath) -> None:  # noqa: ARG002 - of two jobs the slower gets an error
        return None


# Work in a few threads, for as long as the process lives.


Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return what the function returns for each item; the first error ends the work and is raised.

    Unlike an executor it works while the interpreter waits for its last threads, when the last checkpoint is written.
    """
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

    threads = [threading.Thread(target=work) for _ in range(min(THREADS, len(items)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(items))]
