"""Locations of checkpoints: paths of this machine, and URLs of stores that fsspec reaches."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dstrat.errors import MissingRequirementError, RequestError, StoreError
from dstrat.plugins.known import pip_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_URL = re.compile(r"[A-Za-z][\w+.:-]*://")
_FILE = "file://"


class RemotePath:
    """A file or folder of a store, with what checkpoints need of :class:`pathlib.Path`.

    A store has no folders: one is there where something is below it.  What was written is seen by others when the call
    returns; nothing is remembered of what was there before.  An object store (``s3://``, ``gs://``, ``abfs://``) shows
    a file as a whole or not at all.  A file server (``sftp://``, ``hdfs://``, ``smb://``) shows it while it is written,
    and keeps a part of it where that was cut short.

    Args:
        url: Such as ``"s3://bucket/folder"``.
    """

    def __init__(self, url: str) -> None:
        self._protocol, _, path = url.partition("://")
        self._path = path.rstrip("/") or path[:1]  # a root stays one
        self._url = f"{self._protocol}://{self._path}"

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url.removesuffix('/')}/{name}")

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self._path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """What is before the last slash; of the root itself."""
        return RemotePath(f"{self._protocol}://{''.join(self._path.rpartition('/')[:2])}")

    def absolute(self) -> RemotePath:
        """Return the same."""
        return self

    # Looking

    def exists(self) -> bool:
        """Return whether there is a file of that name, or something below it."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Return whether something is below it."""
        return self._type() == "directory"

    def is_file(self) -> bool:
        """Return whether it is a file."""
        return self._type() == "file"

    def size(self) -> int:
        """Return the bytes of the file."""
        with self._reached() as (store, path):
            return int(store.info(path)["size"])

    def modified_ns(self) -> int:
        """Return when the file was written, in nanoseconds since the epoch."""
        with self._reached() as (store, path):
            return int(store.modified(path).timestamp() * 1e9)

    def iterdir(self) -> list[RemotePath]:
        """Return what is in the folder; nothing where it is not there."""
        return [self / name for name in self._listed()]

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file in the folder, by its name."""
        return {name: int(facts["size"]) for name, facts in self._listed().items() if facts["type"] == "file"}

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return what matches below it."""
        with self._reached() as (store, path):
            return [self / found[len(path) + 1 :] for found in store.glob(f"{path}/{pattern}")]

    # Reading and writing

    def read_bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of the file between two positions."""
        with self._reached() as (store, path):
            return bytes(store.cat_file(path, start=begin, end=end))

    def write_bytes(self, data: bytes) -> None:
        """Write the file, also in place of another one; at once in an object store."""
        with self._reached() as (store, path):
            store.pipe_file(path, data)

    def create(self, data: bytes) -> None:
        """Write a new file.

        Raises:
            FileExistsError: It is there; in stores that can tell, also where another process was faster.
        """
        with self._reached() as (store, path):
            store.pipe_file(path, data, mode="create")

    def open_writer(self, block_size: int) -> Any:
        """Return a file object for a new file, whole when it is closed; in an object store it is not there before."""
        with self._reached() as (store, path):
            return store.open(path, "wb", block_size=block_size)

    def download(self, target: Path) -> None:
        """Copy the file to this machine."""
        with self._reached() as (store, path):
            store.get_file(path, str(target))

    def upload(self, source: Path) -> None:
        """Write the file with the content of one of this machine."""
        with self._reached() as (store, path):
            store.put_file(str(source), path)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file."""
        try:
            with self._reached() as (store, path):
                store.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_below(self) -> None:
        """Remove everything below it, if there is anything."""
        with contextlib.suppress(FileNotFoundError), self._reached() as (store, path):
            store.rm(path, recursive=True)

    def _type(self) -> str | None:
        info = self._info()
        return None if info is None else str(info["type"])

    def _info(self) -> Any:
        try:
            with self._reached() as (store, path):
                return store.info(path)
        except FileNotFoundError:
            return None

    def _listed(self) -> dict[str, Any]:
        try:
            with self._reached() as (store, path):
                found = store.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = {facts["name"].rstrip("/").rpartition("/")[2]: facts for facts in found}
        return {name: named[name] for name in sorted(named)}

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Yield the store and the path in it; errors of the store are ours."""
        store, path = _store(self._url)
        try:
            store.invalidate_cache()  # of listings: other processes write too
            yield store, path
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise
        except Exception as error:  # whatever the client of that kind of store raises
            reason = str(error) or type(error).__name__
            raise StoreError(f"{self._url!r} cannot be used: {reason}") from error


Place: TypeAlias = Path | RemotePath


def place(path: str | os.PathLike[str] | RemotePath, name: str = "path") -> Place:
    """Return what a path or URL means; ``~`` at the beginning is the home folder.

    Args:
        path: A path of this machine or a URL.
        name: What the user knows it as.

    Raises:
        MissingRequirementError: What reaches that kind of store is not installed.
        RequestError: No such kind of store is known, or it is no path.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, os.PathLike):
        return home_path(path)
    if not isinstance(path, str):
        raise RequestError(f"{name}={path!r} is of the type {type(path).__name__}: give a str or a Path")
    if path.startswith(_FILE):
        return Path(path.removeprefix(_FILE))
    if not _URL.match(path):
        return home_path(path)
    _store(path)
    return RemotePath(path)


def home_path(path: str | os.PathLike[str]) -> Path:
    """Return a path of this machine; ``~`` at the beginning is the home folder."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser fails where there is no such user


def on_this_machine(where: Place) -> Path:
    """Return the path, or the working directory for a URL: for what can only be written to a file system."""
    return where if isinstance(where, Path) else Path.cwd()


def _store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no types

    try:
        store, path = url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or "the package that fsspec names"
        raise MissingRequirementError(
            f"{url!r} needs {package}, which is not installed: {pip_command(package)}"
        ) from error
    except ValueError as error:
        raise RequestError(
            f"{url!r} begins with a protocol that fsspec does not know ({error}): give a path, or a URL such as "
            "'s3://bucket/folder'"
        ) from error
    return store, str(path)
