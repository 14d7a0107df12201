"""The logger that stands in for the user's where nothing is to be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.training.loggers.logger import Logger
from dstrat.training.loggers.writer import Silence

if TYPE_CHECKING:
    from collections.abc import Mapping


class SilentLogger(Logger):
    """Takes every call of any logger and does nothing, so that code which uses one can be tried."""

    @property
    def experiment(self) -> Silence:
        return Silence()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass

    def __getattr__(self, name: str) -> Silence:
        """Answer for the methods that one kind of logger has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Silence()
