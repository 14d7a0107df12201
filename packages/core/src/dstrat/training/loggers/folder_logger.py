"""What loggers share that write to a numbered folder."""

from __future__ import annotations

from pathlib import Path

from dstrat.training.loggers.logger import Logger
from dstrat.training.loggers.version_folder import VersionFolder


class FolderLogger(Logger):
    """A logger whose files are in ``<save_dir>/<name>/version_<n>``.

    Args:
        save_dir: Holds everything; by default the trainer's ``default_root_dir``.
        name: The folder in it that holds all versions.
        version: A number, or a folder's own name; by default the next number that is free.
    """

    def __init__(
        self, save_dir: str | Path | None = None, name: str = "dstrat_logs", version: int | str | None = None
    ) -> None:
        self.root_dir = None if save_dir is None else Path(save_dir)
        self._folder = VersionFolder(name, version)

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

    @property
    def claimed_dir(self) -> Path:
        """The folder of this run, in the process that writes."""
        return self._folder.claim(self.root_dir)
