"""Progress as bars that move, at the bottom of a terminal."""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dstrat.training.callbacks.pinned_lines import PinnedLines
from dstrat.training.callbacks.progress import format_count, format_duration, format_speed, format_value
from dstrat.training.callbacks.rich_progress_bar import RichProgressBarTheme

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import ConsoleOptions

    from dstrat.training.callbacks.progress import Progress

_drawing = threading.RLock()


@cache
def _forbid_forks_while_drawing() -> None:
    """Let a fork wait for a thread that draws: the child would inherit the locks of its streams, and wait for ever."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


class LiveDisplay:
    """Bars for the loops that run, with the values below; whatever is written appears above them."""

    seconds_between_updates = 0.3
    starts_at_once = True
    shows_time = True

    def __init__(
        self, theme: RichProgressBarTheme | None = None, *, leaves: bool = False, **console_options: Any
    ) -> None:
        _forbid_forks_while_drawing()
        self._theme, self._leaves = theme or RichProgressBarTheme(), leaves
        self._lines = PinnedLines(Console(**{"stderr": True, **console_options}))

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Draw the loops that run, outermost first."""
        with _drawing:
            self._lines.draw(_drawing_of(running, values, self._theme))

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Take the last state of a loop; the next one takes its place, or comes below it where bars are left."""
        with _drawing:
            drawing = _drawing_of([progress], values, self._theme)
            if self._leaves:
                self._lines.release(drawing)
            else:
                self._lines.set(drawing)

    def close(self) -> None:
        """Draw a last time, and give the terminal back."""
        self._lines.close()


def _drawing_of(running: Sequence[Progress], values: Mapping[str, float | str], theme: RichProgressBarTheme) -> Group:
    table = Table.grid(padding=(0, 1), expand=True)
    styles = (theme.description, "", theme.batch_progress, theme.processing_speed, theme.time, theme.time)
    for ratio, style in zip((None, 1, None, None, None, None), styles, strict=True):
        table.add_column(ratio=ratio, no_wrap=True, style=style)
    for progress in running:
        left = format_duration(progress.seconds_left)
        table.add_row(
            progress.title,
            ProgressBar(
                total=progress.total,
                completed=progress.done,
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            format_count(progress),
            format_speed(progress.speed),
            format_duration(progress.seconds),
            left and f"{left} left",
        )
    return Group(table, _Values(values, theme)) if values else Group(table)


class _Values:
    """Values after their names, in as many lines as they need."""

    def __init__(self, values: Mapping[str, float | str], theme: RichProgressBarTheme) -> None:
        self._values, self._theme = values, theme

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        between, line = self._theme.metrics_text_delimiter, ""
        for name, value in self._values.items():
            pair = f"{name} {self._format(value)}"
            if line and cell_len(f"{line}{between}{pair}") > options.max_width:
                yield Text(line, self._theme.metrics)
                line = pair
            else:
                line = f"{line}{between}{pair}" if line else pair
        yield Text(line, self._theme.metrics)

    def _format(self, value: float | str) -> str:
        form = self._theme.metrics_format
        return format(value, form) if form and not isinstance(value, str) else format_value(value)
