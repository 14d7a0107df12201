"""Progress of a loop over batches: counts, speed, formatting."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_SAMPLES = 20  # updates that a speed is measured over: some seconds on a terminal


class Progress:
    """The progress of one loop over batches.

    Args:
        title: Title of the loop.
        total: Number of its batches; None if it is unknown.
        done: Number of batches done before, in a resumed epoch.

    Attributes:
        done: Number of batches done.
    """

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self._start = monotonic()
        self._samples = deque([(self._start, done)], maxlen=_SAMPLES)

    def reach(self, done: int) -> None:
        """Update the number of batches done."""
        if done != self.done:  # a redraw within a batch is no sample: the speed would fall until the batch ends
            self.done = done
            self._samples.append((monotonic(), done))

    def skip(self, seconds: float) -> None:
        """Exclude a time from the speed, in which the loop waited for a nested one."""
        self._samples = deque(((time + seconds, done) for time, done in self._samples), maxlen=_SAMPLES)

    @property
    def speed(self) -> float | None:
        """Recent batches per second; None before the first measurement."""
        (start, done_before), (end, done) = self._samples[0], self._samples[-1]
        return (done - done_before) / (end - start) if done > done_before and end > start else None

    @property
    def seconds(self) -> float:
        """Seconds since the loop started."""
        return monotonic() - self._start

    @property
    def seconds_remaining(self) -> float | None:
        """Seconds until the end at the recent speed; None if it is unknown."""
        if self.total is None or self.speed is None or self.done >= self.total:
            return None
        return (self.total - self.done) / self.speed


def format_count(progress: Progress) -> str:
    """Return the number of batches done, with their total if it is known."""
    return str(progress.done) if progress.total is None else f"{progress.done}/{progress.total}"


def format_speed(speed: float | None) -> str:
    """Return a speed as batches per second, or as seconds per batch if it is below 1."""
    if speed is None:
        return ""
    return f"{format_value(1 / speed, digits=3)} s/it" if speed < 1 else f"{format_value(speed, digits=3)} it/s"


def format_remaining(progress: Progress) -> str:
    """Return the time until the end; empty if it is unknown."""
    seconds = progress.seconds_remaining
    return "" if seconds is None else f"{format_duration(seconds)} left"


def format_duration(seconds: float) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds_of_minute = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_of_minute:02d}" if hours else f"{minutes}:{seconds_of_minute:02d}"


def format_value(value: float | str, *, digits: int = 4) -> str:
    """Return a number with a number of significant digits, at least all before the point; integers without a point."""
    if isinstance(value, str):  # of a subclass's get_metrics
        return value
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    if 10**digits <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


# Progress of an evaluation over one or several loaders


class EvaluationProgress:
    """The progress of an evaluation over all loaders, with the current one in its title.

    Args:
        title: Title of the evaluation.
        counts: Number of batches of each loader; None for an unknown one.
        batches_per_item: Number of batches in a call of a compiled step; otherwise 1.
    """

    def __init__(self, title: str, counts: Sequence[int | None], batches_per_item: int = 1) -> None:
        self._title, self._counts, self._batches_per_item = title, counts, batches_per_item
        known_counts = [count for count in counts if count is not None]
        self._progress = Progress(title, sum(known_counts) if len(known_counts) == len(counts) else None)
        self._done = [0] * len(counts)

    def count(self, dataloader_idx: int, refresh_rate: int) -> bool:
        """Count an item of a loader, and return whether a multiple of the refresh rate is reached."""
        self._done[dataloader_idx] += self._batches_per_item
        return self._done[dataloader_idx] % refresh_rate < self._batches_per_item

    def now(self) -> Progress:
        """Return the current progress, with the loader in its title."""
        self._progress.reach(sum(self._done))
        if len(self._counts) > 1:
            self._progress.title = f"{self._title} {self._index + 1} of {len(self._counts)}"
        return self._progress

    def finished(self) -> Progress:
        """Return the progress at the end."""
        progress = self.now()
        progress.title = self._title
        return progress

    @property
    def _index(self) -> int:
        """Index of the current loader: the last one with batches done, or the next one if all of these are."""
        index = max((index for index, done in enumerate(self._done) if done), default=0)
        is_over = self._done[index] == self._counts[index]
        return min(index + is_over, len(self._counts) - 1)


# Progress as lines of text, for files and pipes


class LineDisplay:
    """Display that prints a line to stderr at intervals, and one at the end of each loop."""

    seconds_between_updates = 10.0
    starts_at_once = False  # a short epoch has one line, that of its end
    shows_time = False

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Print a line about the innermost running loop."""
        _write(", in ".join(progress.title for progress in reversed(running)), running[-1], values)

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Print the line of a finished loop."""
        _write(progress.title, progress, values)

    def close(self) -> None:
        """Do nothing: each line is complete."""


def _write(title: str, progress: Progress, values: Mapping[str, float | str]) -> None:
    print(format_line(title, progress, values), file=sys.stderr, flush=True)


def format_line(title: str, progress: Progress, values: Mapping[str, float | str]) -> str:
    """Return a loop's title, its progress and the values in one line."""
    facts = [
        f"{format_count(progress)} batches",
        format_speed(progress.speed),
        format_remaining(progress),
        *(f"{name} {format_value(value)}" for name, value in values.items()),
    ]
    return f"{title}: {', '.join(filter(None, facts))}"


# Locks of displays that a second thread draws


drawing = threading.RLock()
"""Held by the thread that draws."""


@cache  # the hooks of a process cannot be removed
def forbid_forks_while_drawing() -> None:
    """Make forks wait for a thread that draws."""
    # A child forked meanwhile would inherit the locked locks of the streams, and wait forever.
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(before=drawing.acquire, after_in_parent=drawing.release, after_in_child=drawing.release)
