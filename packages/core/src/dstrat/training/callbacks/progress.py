"""Progress of a loop over batches: counts, speed, formatting."""

from __future__ import annotations

from collections import deque
from time import monotonic

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
    def seconds_left(self) -> float | None:
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
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_value(value: float | str, *, digits: int = 4) -> str:
    """Return a number with so many significant digits, and no fewer before the point; whole numbers as ints."""
    if isinstance(value, str):  # from get_metrics
        return value
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    if 10**digits <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
