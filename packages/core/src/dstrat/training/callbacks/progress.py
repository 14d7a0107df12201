"""Progress of a loop over batches: counts, speed, formatting."""

from __future__ import annotations

import sys
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_SAMPLES = 20  # updates that a speed is measured over: some seconds on a terminal


class Progress:
    """How far one loop over batches is.

    Args:
        title: What the loop does.
        total: Number of its batches, None where it is unknown.
        done: Number of batches that are done already, as where an epoch is continued.

    Attributes:
        done: Number of batches that are done.
    """

    def __init__(self, title: str, total: int | None, done: int = 0) -> None:
        self.title, self.total, self.done = title, total, done
        self._start = monotonic()
        self._samples = deque([(self._start, done)], maxlen=_SAMPLES)

    def reach(self, done: int) -> None:
        """Take the number of batches that are done now."""
        if done != self.done:
            self.done = done
            self._samples.append((monotonic(), done))

    def skip(self, seconds: float) -> None:
        """Leave out of the speed a time in which the loop waited for another one."""
        self._samples = deque(((time + seconds, done) for time, done in self._samples), maxlen=_SAMPLES)

    @property
    def speed(self) -> float | None:
        """Batches per second lately, None before any can be told."""
        (start, done_before), (end, done) = self._samples[0], self._samples[-1]
        return (done - done_before) / (end - start) if done > done_before and end > start else None

    @property
    def seconds(self) -> float:
        """Seconds since the loop started."""
        return monotonic() - self._start

    @property
    def seconds_remaining(self) -> float | None:
        """Seconds until the end at the present speed, None where that is unknown."""
        if self.total is None or self.speed is None or self.done >= self.total:
            return None
        return (self.total - self.done) / self.speed


def format_count(progress: Progress) -> str:
    """Return the batches that are done, of how many."""
    return str(progress.done) if progress.total is None else f"{progress.done}/{progress.total}"


def format_speed(speed: float | None) -> str:
    """Return a speed as batches per second, or seconds per batch where these are more than one."""
    if speed is None:
        return ""
    return f"{format_value(1 / speed, digits=3)} s/it" if speed < 1 else f"{format_value(speed, digits=3)} it/s"


def format_duration(seconds: float | None) -> str:
    """Return a duration as ``m:ss`` or ``h:mm:ss``."""
    if seconds is None:
        return ""
    minutes, seconds_of_minute = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_of_minute:02d}" if hours else f"{minutes}:{seconds_of_minute:02d}"


def format_value(value: float | str, *, digits: int = 4) -> str:
    """Return a number with so many significant digits, and no fewer before the point; whole numbers as ints."""
    if isinstance(value, str):  # from get_metrics
        return value
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    if 10**digits <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


# Progress of an evaluation over one or several loaders.


class EvaluationProgress:
    """How far validation, testing or prediction is, over all loaders; with several its title says which one is read.

    Args:
        title: What the loop does.
        counts: Number of batches of each loader; None where it is unknown.
        batches_per_item: Number of batches that end together.
    """

    def __init__(self, title: str, counts: Sequence[int | None], batches_per_item: int = 1) -> None:
        self._title, self._counts, self._batches_per_item = title, counts, batches_per_item
        known_counts = [count for count in counts if count is not None]
        self._progress = Progress(title, sum(known_counts) if len(known_counts) == len(counts) else None)
        self._done = [0] * len(counts)

    def count(self, dataloader_idx: int, refresh_rate: int) -> bool:
        """Count what has ended of a loader; return whether that reaches a multiple of so many batches."""
        self._done[dataloader_idx] += self._batches_per_item
        return self._done[dataloader_idx] % refresh_rate < self._batches_per_item

    def now(self) -> Progress:
        """Return the present state, with the loader that is read."""
        self._progress.reach(sum(self._done))
        if len(self._counts) > 1:
            self._progress.title = f"{self._title} {self._index + 1} of {len(self._counts)}"
        return self._progress

    def finished(self) -> Progress:
        """Return the state at the end."""
        progress = self.now()
        progress.title = self._title
        return progress

    @property
    def _index(self) -> int:
        """Index of the loader that is read: the last with batches that are done, or the next where these are all."""
        index = max((index for index, done in enumerate(self._done) if done), default=0)
        is_over = self._done[index] == self._counts[index]
        return min(index + is_over, len(self._counts) - 1)


# Progress as lines of text, for files, pipes and notebooks.


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
    remaining = format_duration(progress.seconds_remaining)
    facts = [
        f"{format_count(progress)} batches",
        format_speed(progress.speed),
        f"{remaining} left" if remaining else "",
        *(f"{name} {format_value(value)}" for name, value in values.items()),
    ]
    print(f"{title}: {', '.join(filter(None, facts))}", file=sys.stderr, flush=True)
