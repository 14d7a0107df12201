"""Paths of checkpoints: local paths, and URLs of stores that fsspec supports."""

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
    """A file or folder of a store, with the methods of :class:`pathlib.Path` that checkpoints need.

    A store has no empty folders: a folder exists if a file is below it.  A write is visible to other processes when
    the call returns, and listings are never cached.  Writes to an object store (``s3://``, ``gs://``, ``abfs://``) are
    atomic.  A file server (``sftp://``, ``hdfs://``, ``smb://``) shows a file while it is written, and keeps a
    truncated one after a crash.

    Args:
        url: Such as ``"s3://bucket/folder"``.
    """

    def __init__(self, url: str) -> None:
        self._protocol, _, path = url.partition("://")
        self._path = path.rstrip("/") or path[:1]  # "/" itself is the root
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

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self._path.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The file extension, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The path without its last component; the root is its own parent."""
        return RemotePath(f"{self._protocol}://{''.join(self._path.rpartition('/')[:2])}")

    def absolute(self) -> RemotePath:
        """Return the path itself: a URL is absolute."""
        return self

    # Queries

    def exists(self) -> bool:
        """Return whether the file or folder exists."""
        return self._info() is not None

    def is_dir(self) -> bool:
        """Return whether the path is a folder."""
        return self._type() == "directory"

    def is_file(self) -> bool:
        """Return whether the path is a file."""
        return self._type() == "file"

    def size(self) -> int:
        """Return the size of the file in bytes."""
        with self._reached() as (store, path):
            return int(store.info(path)["size"])

    def modified_ns(self) -> int:
        """Return the modification time of the file, in nanoseconds since the epoch."""
        with self._reached() as (store, path):
            return int(store.modified(path).timestamp() * 1e9)

    def iterdir(self) -> list[RemotePath]:
        """Return the entries of the folder; an empty list if it does not exist."""
        return [self / name for name in self._listed()]

    def file_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file in the folder, by name."""
        return {name: int(facts["size"]) for name, facts in self._listed().items() if facts["type"] == "file"}

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return the paths below the folder that match a pattern."""
        with self._reached() as (store, path):
            return [self / match[len(path) + 1 :] for match in store.glob(f"{path}/{pattern}")]

    # Reading and writing

    def read_bytes(self, begin: int = 0, end: int | None = None) -> bytes:
        """Return the bytes of the file from ``begin`` to ``end``."""
        with self._reached() as (store, path):
            return bytes(store.cat_file(path, start=begin, end=end))

    def write_bytes(self, data: bytes) -> None:
        """Write the file, replacing an existing one; atomic in an object store."""
        with self._reached() as (store, path):
            store.pipe_file(path, data)

    def create(self, data: bytes) -> None:
        """Write a new file.

        Raises:
            FileExistsError: The file exists; in stores with conditional writes also if another process creates it
                meanwhile.
        """
        with self._reached() as (store, path):
            store.pipe_file(path, data, mode="create")

    def open_writer(self, block_size: int) -> Any:
        """Return a file object that writes a new file; an object store shows the file when it is closed."""
        with self._reached() as (store, path):
            return store.open(path, "wb", block_size=block_size)

    def download(self, target: Path) -> None:
        """Copy the file to a local path."""
        with self._reached() as (store, path):
            store.get_file(path, str(target))

    def upload(self, source: Path) -> None:
        """Write the file with the content of a local file."""
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
        """Remove the folder with everything in it, if it exists."""
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
                entries = store.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        # Some file systems end the names of folders with a slash.
        by_name = {facts["name"].rstrip("/").rpartition("/")[2]: facts for facts in entries}
        return {name: by_name[name] for name in sorted(by_name)}

    @contextlib.contextmanager
    def _reached(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; its client's errors become :class:`StoreError`."""
        store, path = _store(self._url)
        try:
            store.invalidate_cache()  # fsspec caches listings, and other ranks write to the same folders
            yield store, path
        except (FileNotFoundError, FileExistsError, NotADirectoryError):  # answers, not failures of the store
            raise
        except Exception as error:  # each store's client has its own exception classes
            reason = str(error) or type(error).__name__
            raise StoreError(f"{self._url!r} cannot be used: {reason}") from error


if TYPE_CHECKING:
    _Path = Path
else:  # Path itself cannot be subclassed before Python 3.12, only the class of its instances
    _Path = type(Path())


class LocalPath(_Path):
    """A local path that can be added to a str, as programs for Lightning do: ``trainer.log_dir + "/images"``."""

    def __add__(self, text: str) -> str:
        return f"{self}{text}"

    def __radd__(self, text: str) -> str:
        return f"{text}{self}"


CheckpointPath: TypeAlias = Path | RemotePath


def as_path(path: str | os.PathLike[str] | RemotePath, name: str = "path") -> CheckpointPath:
    """Return a user's path as a local or a remote path; a leading ``~`` is the home folder.

    Args:
        path: A local path or a URL.
        name: The name of the user's argument, for messages.

    Raises:
        MissingRequirementError: The client of the URL's protocol is not installed.
        RequestError: fsspec does not know the protocol, or the value is not a path.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, os.PathLike):
        return home_path(path)
    if not isinstance(path, str):
        raise RequestError(f"{name}={path!r} is of the type {type(path).__name__}: give a str or a Path")
    if path.startswith(_FILE):  # a local path, with the locks and renames that stores lack
        return LocalPath(path.removeprefix(_FILE))
    if not _URL.match(path):
        return home_path(path)
    _store(path)  # raises now, not when the first checkpoint is saved
    return RemotePath(path)


def home_path(path: str | os.PathLike[str]) -> LocalPath:
    """Return a local path; a leading ``~`` is the home folder."""
    return LocalPath(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser fails where there is no such user


def shown_path(path: str | os.PathLike[str] | RemotePath) -> str:
    """Return a path as messages show it: relative to the working directory where it is below that."""
    try:
        return str(Path(str(path)).relative_to(Path.cwd()))
    except (OSError, ValueError):  # the working directory may have been removed
        return str(path)


def local_folder(path: CheckpointPath) -> Path:
    """Return a local path unchanged and the working directory for a URL, for writers that need a file system."""
    return path if isinstance(path, Path) else LocalPath.cwd()


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
