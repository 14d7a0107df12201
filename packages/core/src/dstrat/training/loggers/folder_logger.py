"""Base of loggers that write to a numbered folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import home_path
from dstrat.errors import LoggerError, RequestError
from dstrat.training.loggers.logger import Logger, as_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping


class FolderLogger(Logger):
    """A logger whose files are in ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: Holds everything; by default the trainer's ``default_root_dir``.
        name: The folder in it that holds all versions; None and ``""`` are ``save_dir`` itself.
        version: A number, or a folder's own name; by default the next number that is free.
        prefix: Comes before the names of values, with a hyphen between.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "dstrat_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self.root_dir = None if save_dir is None else home_path(save_dir)
        self._folder = VersionFolder(name or "", version)
        self._prefix = prefix
        self._hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def version(self) -> int | str | None:
        return self._folder.version

    @property
    def log_dir(self) -> Path | None:
        return self._folder.claim(self.root_dir) if self.writes else self._folder.claimed

    def join(self, log_dir: Path | None) -> None:
        self._folder.join(log_dir)

    def write_hparams(self, params: Mapping[str, Any]) -> None:
        """Add settings to those in ``hparams.json``."""
        self._hparams |= as_mapping(params)
        path = self.claimed_dir / "hparams.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(self._hparams, indent=2, default=str) + "\n")
        temporary.replace(path)

    @property
    def claimed_dir(self) -> Path:
        """The folder of this run, in the process that writes."""
        return self._folder.claim(self.root_dir)


# The folder of one run: ``<root>/<name>/version_<n>``.


_VERSION = re.compile(r"version_(\d+)")


class VersionFolder:
    """A numbered folder that belongs to one run, also where several start at the same moment.

    Args:
        name: The folder that holds all versions; empty for the root itself.
        version: A number, or a folder's own name; None takes the next number that is free.

    Attributes:
        name: The folder that holds all versions; empty for the root itself.
        claimed: The folder, None before the first claim.

    Raises:
        RequestError: The version is neither.
    """

    def __init__(self, name: str, version: int | str | None) -> None:
        if version is not None and (not isinstance(version, int | str) or isinstance(version, bool)):
            raise RequestError(f"version={version!r} must be a number, a folder's name, or None for the next number")
        self.name = name
        self.claimed: Path | None = None
        self._version = version

    @property
    def version(self) -> int | str | None:
        """The number or name; None before one was claimed."""
        if self._version is not None or self.claimed is None:
            return self._version
        match = _VERSION.fullmatch(self.claimed.name)
        return int(match[1]) if match else self.claimed.name

    def claim(self, root: Path | None) -> Path:
        """Return the folder; the first call creates it, because a number is taken only by a folder that exists.

        Args:
            root: Holds everything; None is the working directory.

        Raises:
            LoggerError: The system refuses it, as a name that is too long.
        """
        if self.claimed is None:
            parent = Path(root or Path.cwd()) / self.name
            try:
                parent.mkdir(parents=True, exist_ok=True)
                self.claimed = _next_version(parent) if self._version is None else _named_version(parent, self._version)
            except OSError as error:
                raise LoggerError(
                    f"the folder of a logger cannot be made ({error.strerror}: {str(error.filename)!r}): choose "
                    "another save_dir, name or version; the Trainer's default logger is in its default_root_dir, and "
                    "logger=False leaves it out"
                ) from error
        return self.claimed

    def join(self, folder: Path | None) -> None:
        """Take the folder that another process of the same run has claimed."""
        self.claimed = folder


def _named_version(parent: Path, version: int | str) -> Path:
    folder = parent / (f"version_{version}" if isinstance(version, int) else version)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _next_version(parent: Path) -> Path:
    matches = (_VERSION.fullmatch(entry.name) for entry in parent.iterdir())
    number = max((int(match[1]) for match in matches if match), default=-1) + 1
    while True:
        folder = parent / f"version_{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took it in this moment
            number += 1
        else:
            return folder
