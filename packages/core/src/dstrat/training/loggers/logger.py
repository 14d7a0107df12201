"""The base class of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Logger(ABC):
    """Where logged values are written.  Only global rank 0 writes; files are opened by the first write.

    Attributes:
        root_dir: The folder that holds everything of this logger; None takes the trainer's ``default_root_dir``.
    """

    root_dir: Path | None = None

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run, None for a logger that writes elsewhere."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write values by name.

        Args:
            metrics: Plain numbers.
            step: Number of optimizer steps taken.
        """

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the settings of a run."""

    def save(self) -> None:
        """Bring what was written to the disk."""

    def finalize(self, status: str) -> None:
        """Close what was opened; the status is success, failed or interrupted."""
