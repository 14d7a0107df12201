"""Progress as lines of text, for files, pipes and notebooks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dstrat.training.callbacks.progress import format_count, format_duration, format_speed, format_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.training.callbacks.progress import Progress


class LineDisplay:
    """Writes a line to stderr now and then, and one for each loop that is over."""

    seconds_between_updates = 10.0
    starts_at_once = False
    shows_time = False

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Write a line about the innermost loop that runs."""
        _write(", in ".join(progress.title for progress in reversed(running)), running[-1], values)

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Write the line of a loop that is over."""
        _write(progress.title, progress, values)

    def close(self) -> None:
        """Do nothing: each line is complete."""


def _write(title: str, progress: Progress, values: Mapping[str, float | str]) -> None:
    left = format_duration(progress.seconds_left)
    facts = [
        f"{format_count(progress)} batches",
        format_speed(progress.speed),
        f"{left} left" if left else "",
        *(f"{name} {format_value(value)}" for name, value in values.items()),
    ]
    print(f"{title}: {', '.join(filter(None, facts))}", file=sys.stderr, flush=True)
