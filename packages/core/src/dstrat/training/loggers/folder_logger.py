"""Base class of loggers that write to a numbered folder."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import LocalPath, home_path
from dstrat.errors import LoggerError, RequestError
from dstrat.training.loggers.logger import Logger, as_mapping

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class FolderLogger(Logger):
    """A logger whose files are in ``<save_dir>/<name>/version_<n>``; a subclass may override each of the three.

    Args:
        save_dir: Folder of all runs; by default the Trainer's ``default_root_dir``.
        name: Subfolder of all versions; None and ``""`` are ``save_dir`` itself.
        version: A number, or the name of a folder; by default the next free number.
        prefix: Prefix of names, separated by a hyphen.

    Raises:
        RequestError: The version is neither a number nor a name.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "dstrat_logs",
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        if version is not None and (not isinstance(version, int | str) or isinstance(version, bool)):
            raise RequestError(f"version={version!r} must be a number, a folder's name, or None for the next number")
        self.root_dir = None if save_dir is None else home_path(save_dir)
        self._name, self._version = name or "", version
        self._folder = VersionFolder()
        self._prefix = prefix
        self._hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str | None:
        """The number or name; without one that of ``log_dir``, and None while the folder of all runs is not known."""
        if self._version is not None:
            return self._version
        if self._folder.claimed is None and self.writes and self.save_dir is not None:
            self._folder.claim(self._parent, None)  # not _claim, which reads the version of a subclass
        claimed = self._folder.claimed
        if claimed is None:
            return None
        match = _VERSION.fullmatch(claimed.name)
        return int(match[1]) if match else claimed.name

    @property
    def log_dir(self) -> Path | None:
        return self._claim() if self.writes else self._folder.claimed

    @property
    def has_fixed_version(self) -> bool:
        return self._version is not None

    def join(self, log_dir: Path | None) -> None:
        self._folder.join(log_dir)

    def write_hparams(self, params: Mapping[str, Any]) -> None:
        """Add hyperparameters to ``hparams.json``."""
        self._hparams |= as_mapping(params)
        path = self.claimed_dir / "hparams.json"
        temporary = path.with_suffix(".json.tmp")  # a reader, or a killed process, never has half a file
        temporary.write_text(json.dumps(self._hparams, indent=2, default=str) + "\n")
        temporary.replace(path)

    @property
    def claimed_dir(self) -> Path:
        """The folder of this run, in the process that writes."""
        folder = home_path(self.log_dir or self._claim())  # of a subclass possibly a str, and not created
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def _parent(self) -> Path:
        return LocalPath(self.save_dir or LocalPath.cwd()) / (self.name or "")

    def _claim(self) -> Path:
        return self._folder.claim(self._parent, self.version)


# The folder of a run: ``<root>/<name>/version_<n>``


_VERSION = re.compile(r"version_(\d+)")


class VersionFolder:
    """A numbered folder of one run, also if several runs start at the same time.

    Attributes:
        claimed: The folder; None before the first claim.
    """

    claimed: Path | None = None

    def claim(self, parent: Path, version: int | str | None) -> Path:
        """Return the folder; the first call creates it, since only an existing folder reserves its number.

        Args:
            parent: Folder of all versions.
            version: The number or name of this one; None is the next free number.

        Raises:
            LoggerError: The folder cannot be created, for example because its name is too long.
        """
        if self.claimed is None:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                self.claimed = _next_version(parent) if version is None else _named_version(parent, version)
            except OSError as error:
                raise LoggerError(
                    f"the folder of a logger cannot be made ({error.strerror}: {str(error.filename)!r}): choose "
                    "another save_dir, name or version; the Trainer's default logger writes to its default_root_dir, "
                    "and logger=False switches it off"
                ) from error
        return self.claimed

    def join(self, folder: Path | None) -> None:
        """Set the folder that another process of the same run has claimed."""
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
        except FileExistsError:  # another run has created it at the same time
            number += 1
        else:
            return folder
