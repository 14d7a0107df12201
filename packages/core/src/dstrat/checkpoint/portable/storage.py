"""Storage operations on disks and in object stores, several at a time."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from dstrat.checkpoint.paths import RemotePath
from dstrat.checkpoint.portable.format import THREADS
from dstrat.checkpoint.portable.local_files import (
    DiskFile,
    UnfinishedFolder,
    remove_folder,
    replace_file,
    write_flushed,
    written_whole,
)
from dstrat.checkpoint.portable.remote_files import RemoteFile, UnfinishedUpload, is_claimed, remove_upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dstrat.checkpoint.paths import Place


class Unfinished(Protocol):
    """A checkpoint that is being written."""

    @property
    def path(self) -> Place:
        """Where its files go."""

    def commit(self, manifest: bytes) -> None:
        """Make it complete, when all other files are there."""

    def close(self) -> None:
        """Remove it where it was not committed."""


class ReadFile(Protocol):
    """A file that is read in several threads.

    Attributes:
        size: Its bytes.
    """

    size: int

    def read_into(self, view: memoryview, position: int) -> int:
        """Fill the beginning of a view with the bytes from a position on; return how many, 0 at the end."""

    def close(self) -> None:
        """Close it."""


def begin_checkpoint(target: Place) -> Unfinished:
    """Return a new checkpoint to write.

    Raises:
        CheckpointError: Something is there already.
    """
    return UnfinishedUpload(target) if isinstance(target, RemotePath) else UnfinishedFolder(target)


def write_file(path: Place, data: bytes) -> None:
    """Write a small new file, so that it survives a crash."""
    path.write_bytes(data) if isinstance(path, RemotePath) else write_flushed(path, data)


def replace(path: Place, data: bytes) -> None:
    """Write a file that takes the place of an older one, at once but for stores that are file servers."""
    path.write_bytes(data) if isinstance(path, RemotePath) else replace_file(path, data)


@contextlib.contextmanager
def written(path: Place) -> Iterator[Place]:
    """Yield where to write a file that is whole when the block has ended well.

    On a disk and in an object store nothing is at its path before; in a store that is a file server it grows there.
    """
    if isinstance(path, RemotePath):
        yield path
        return
    with written_whole(path) as temporary:
        yield temporary


def remove(path: Place) -> None:
    """Remove a checkpoint, so that a crash in between leaves nothing that looks like one."""
    remove_upload(path) if isinstance(path, RemotePath) else remove_folder(path)


def open_file(path: Place) -> ReadFile:
    """Return a file to read.

    Raises:
        CheckpointError: It is not there, or no regular file.
    """
    return RemoteFile(path) if isinstance(path, RemotePath) else DiskFile(path)


def read_start(path: Place, size: int) -> bytes:
    """Return at most so many bytes from the beginning of a file."""
    if isinstance(path, RemotePath):
        return path.read_bytes(0, size)
    with path.open("rb") as file:
        return file.read(size)


def file_size(path: Place) -> int:
    """Return the bytes of a file."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def file_sizes(folder: Place) -> dict[str, int]:
    """Return the bytes of each regular file in a folder, by its name.

    Raises:
        OSError: It is no folder.
    """
    if isinstance(folder, RemotePath):
        return folder.file_sizes()
    statuses = {path.name: path.lstat() for path in folder.iterdir()}
    return {name: status.st_size for name, status in statuses.items() if stat.S_ISREG(status.st_mode)}


def is_taken(path: Place) -> bool:
    """Return whether something is there, or is being written there."""
    if isinstance(path, RemotePath):
        return path.exists() or is_claimed(path)
    return os.path.lexists(path)


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
