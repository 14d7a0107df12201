"""Displays of a progress bar: terminal and plain output."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.training.callbacks.progress import Progress


class Display(Protocol):
    """Where progress is shown.

    Attributes:
        seconds_between_updates: How often it is worth an update.
        starts_at_once: Whether the first update comes without that delay.
        shows_time: Whether it shows the time that passes, so that it wants updates while nothing else happens.
    """

    seconds_between_updates: float
    starts_at_once: bool
    shows_time: bool

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Show the loops that run, outermost first."""

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Show a loop that is over."""

    def close(self) -> None:
        """End the display."""


def moves_bars() -> bool:
    """Return whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def make_display() -> Display:
    """Return bars for a terminal that can move its cursor, lines for everything else; rich is loaded for bars only."""
    if moves_bars():
        from dstrat.training.callbacks.progress_live import LiveDisplay

        return LiveDisplay()
    from dstrat.training.callbacks.progress_lines import LineDisplay

    return LineDisplay()
