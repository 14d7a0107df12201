"""Group of commands ``dstrat checkpoint``, and their common output."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.cli.main import LazyGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.checkpoint.paths import CheckpointPath


_HOMES = {name: f"dstrat.cli.checkpoint.{name}" for name in ("consolidate", "convert", "diff", "inspect", "verify")}


@click.command(cls=LazyGroup, homes=_HOMES)
def checkpoint() -> None:
    """Look at checkpoints, verify, compare and convert them.

    A PATH is the folder of a checkpoint, or the file 'last' beside some; or the URL of such a folder in a store that
    fsspec reaches, as s3://bucket/folder is with s3fs.
    """


# Progress bar on standard error, in terminals only


@contextlib.contextmanager
def progress_bar(doing: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that advances it by a number of bytes, from any thread."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=num_bytes)
        yield lambda done: progress.advance(task, done)


# Path arguments of commands: local paths and URLs of stores


class CheckpointPathType(click.ParamType):  # type: ignore[type-arg]  # older ones take no argument
    """A path of this machine, or a URL such as ``s3://bucket/folder``."""

    name = "path"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> CheckpointPath:
        path = as_path(value)
        if isinstance(path, Path):
            try:
                path.stat()  # not exists(), which hides these errors since Python 3.14
            except (FileNotFoundError, NotADirectoryError):  # the command says so, or writes there
                pass
            except OSError as error:  # no access to a folder above it, or a name that is too long
                self.fail(f"{str(path)!r} cannot be used: {str(error.strerror).lower()}", param, ctx)
        return path


CHECKPOINT_PATH = CheckpointPathType()


# Human-readable sizes


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_size(num_bytes: int) -> str:
    """Return a size such as ``"1.5 GiB"``."""
    size = float(num_bytes)
    for unit in _UNITS[:-1]:
        if size < 1023.95:  # from here on it would be shown as 1024.0
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
