"""Progress as an HTML table below a notebook's cell, which updates in place."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.training.callbacks.progress import (
    drawing,
    forbid_forks_while_drawing,
    format_count,
    format_duration,
    format_line,
    format_remaining,
    format_speed,
    format_value,
)
from dstrat.training.callbacks.run_messages import BEST
from dstrat.training.notebook import Output, html_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.training.callbacks.progress import Progress


_LATEST = 10  # epochs that are shown while the training runs: each update sends the whole table


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedLoop:
    """A row of the table.

    Attributes:
        title: Title of the loop.
        facts: Number of batches, time, and speed.
        values: Values by name, as text.
        line: The row as a line of text.
    """

    title: str
    facts: tuple[str, str, str]
    values: dict[str, str]
    line: str

    @classmethod
    def of(cls, progress: Progress, values: Mapping[str, float | str]) -> FinishedLoop:
        """Return the row of a loop that has finished now."""
        return cls(
            title=progress.title,
            facts=(format_count(progress), format_duration(progress.seconds), format_speed(progress.speed)),
            values={name: format_value(value) for name, value in values.items()},
            line=format_line(progress.title, progress, values),
        )


class NotebookDisplay:
    """Display of a row for each finished loop, and of bars for the running ones.

    The whole is one output of the cell, also where rank 0 is a forked process.  A saved notebook has its last state.
    """

    seconds_between_updates = 0.3
    starts_at_once = True
    shows_time = True

    def __init__(self) -> None:
        forbid_forks_while_drawing()
        self._finished: list[FinishedLoop] = []
        self._running: Sequence[Progress] = ()
        self._values: Mapping[str, float | str] = {}
        self._output = Output()

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Draw the latest finished loops, and the running ones, outermost first."""
        with drawing:
            self._running, self._values = running, values
            self._draw(self._finished[-_LATEST:], scrolls=False)

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Add the row of a finished loop, which the next update draws."""
        with drawing:
            self._finished.append(FinishedLoop.of(progress, values))
            self._running, self._values = (), {}

    def close(self) -> None:
        """Draw all finished loops, and those that an error has stopped."""
        with drawing:
            self._draw(self._finished, scrolls=True)

    def _draw(self, rows: Sequence[FinishedLoop], *, scrolls: bool) -> None:
        table = history_table(rows, self._finished) if rows else ""
        if scrolls and rows:
            table = f'<div style="max-height:30em;overflow:auto">{table}</div>'
        elif len(rows) < len(self._finished):
            table = f"<div>{len(self._finished) - len(rows)} earlier ones</div>{table}"
        running = [format_line(progress.title, progress, self._values) for progress in self._running]
        self._output.show(
            f"{table}{running_bars(self._running, self._values)}",
            "\n".join([*(row.line for row in rows), *running]),
        )


def history_table(rows: Sequence[FinishedLoop], finished: Sequence[FinishedLoop]) -> str:
    """Return the table of some finished loops, with a mark at the best value of each name.

    Args:
        rows: The loops.
        finished: These and earlier ones.
    """
    names = list(dict.fromkeys(name for loop in finished for name in loop.values))
    # Each value was the best one when its loop finished; the last of them still is.
    best = {name: loop for loop in finished for name, value in loop.values.items() if value.endswith(BEST)}

    def cell(loop: FinishedLoop, name: str) -> str:
        value = loop.values.get(name, "").removesuffix(BEST)
        return f"best {value}" if best.get(name) is loop else value

    cells = [[loop.title, *loop.facts, *(cell(loop, name) for name in names)] for loop in rows]
    return html_table(["", "batches", "time", "speed", *names], cells, text_columns=[""])


_ROW = "display:flex;gap:0.5em;align-items:center;font-size:smaller;font-variant-numeric:tabular-nums"


def running_bars(running: Sequence[Progress], values: Mapping[str, float | str]) -> str:
    """Return a bar for each running loop, with its counts beside it, and the values below."""
    bars = []
    for progress in running:
        # Without a value the browser shows that something runs.
        done = "" if progress.total is None else f' value="{progress.done}" max="{progress.total}"'
        facts = (format_count(progress), format_speed(progress.speed), format_duration(progress.seconds))
        cells = "".join(
            f'<span style="min-width:5em;text-align:right">{fact}</span>'
            for fact in (*facts, format_remaining(progress))
        )
        bars.append(
            f'<div style="{_ROW}"><span>{html.escape(progress.title)}</span>'
            f'<progress style="flex:1;min-width:6em"{done}></progress>{cells}</div>'
        )
    below = ", ".join(f"{name} {format_value(value)}" for name, value in values.items())
    if below:
        bars.append(f'<div style="font-size:smaller">{html.escape(below)}</div>')
    return "".join(bars)
