"""Progress as bars that move, at the bottom of a terminal."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dstrat.training.callbacks.log_streams import move_handlers
from dstrat.training.callbacks.progress import format_count, format_duration, format_speed, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.training.callbacks.progress import Progress

_drawing = threading.RLock()


@cache
def _forbid_forks_while_drawing() -> None:
    """Let a fork wait for a thread that draws: the child would inherit the locks of its streams, and wait for ever."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


class LiveDisplay:
    """Bars for the loops that run, with the values below; what the program prints appears above them."""

    seconds_between_updates = 0.3
    starts_at_once = True
    shows_time = True

    def __init__(self) -> None:
        _forbid_forks_while_drawing()
        self._live = Live(
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # where it goes to a file, it stays there
        )
        before = (sys.stdout, sys.stderr)
        self._live.start()
        self._replaced = list(zip(before, (sys.stdout, sys.stderr), strict=True))
        for old, new in self._replaced:  # logging handlers keep the stream that they were made with
            move_handlers(old, new)
        self._live.console.show_cursor()  # a process that is killed could not bring it back

    def update(self, running: Sequence[Progress], values: Mapping[str, float]) -> None:
        """Draw the loops that run, outermost first."""
        with _drawing:
            self._live.update(_drawing_of(running, values), refresh=True)

    def finish(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Draw a loop that is over; the next one takes its place."""
        with _drawing:
            self._live.update(_drawing_of([progress], values))

    def close(self) -> None:
        """Draw a last time, and give the terminal back."""
        for old, new in self._replaced:
            move_handlers(new, old)
        self._live.stop()


def _drawing_of(running: Sequence[Progress], values: Mapping[str, float]) -> Group:
    table = Table.grid(padding=(0, 1), expand=True)
    for ratio in (None, 1, None, None, None, None):
        table.add_column(ratio=ratio, no_wrap=True)
    for progress in running:
        left = format_duration(progress.seconds_left)
        table.add_row(
            progress.title,
            ProgressBar(total=progress.total, completed=progress.done),
            format_count(progress),
            format_speed(progress.speed),
            format_duration(progress.seconds),
            left and f"{left} left",
        )
    if not values:
        return Group(table)
    return Group(table, Text("  ".join(f"{name} {format_value(value)}" for name, value in values.items())))
