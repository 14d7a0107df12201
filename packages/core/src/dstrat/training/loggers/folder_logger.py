"""Base of loggers that write to a numbered folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.place import home_path
from dstrat.training.loggers.logger import Logger
from dstrat.training.loggers.parameters import as_mapping
from dstrat.training.loggers.version_folder import VersionFolder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


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
