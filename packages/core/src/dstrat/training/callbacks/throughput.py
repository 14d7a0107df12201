"""Throughput over the last batches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What one process does per second.

    Attributes:
        batches: Batches.
        samples: Samples, 0 where they are not counted.
        tokens: Tokens or whatever else a sample is made of, 0 where they are not counted.
    """

    batches: float
    samples: float
    tokens: float


class Throughput:
    """Counts batches, samples and tokens over a window of the last batches.

    By the clock of the host: what is still queued on a device counts already, which evens out from one batch to the
    next.  For a loop of one's own::

        throughput = Throughput(window_size=100)
        for batch in loader:
            train(batch)
            throughput.add(samples=len(batch))
        print(throughput.rates())

    Args:
        window_size: Number of batches that rates are measured over, at least; more where one call takes several.
    """

    def __init__(self, window_size: int) -> None:
        self._window_size = window_size
        self._ends: deque[tuple[float, int, int, int]] = deque()
        self._batches = self._samples = self._tokens = 0

    def add(self, *, batches: int = 1, samples: int = 0, tokens: int = 0) -> None:
        """Add what was trained on since the last call.

        Args:
            batches: Number of batches; more than one where a compiled step takes several at once.
            samples: Number of samples in all of them.
            tokens: Number of tokens in all of them.
        """
        self._batches += batches
        self._samples += samples
        self._tokens += tokens
        self._ends.append((monotonic(), self._batches, self._samples, self._tokens))
        while self._batches - self._ends[1 if len(self._ends) > 1 else 0][1] >= self._window_size:
            self._ends.popleft()

    def skip(self, seconds: float) -> None:
        """Leave out a time in which something else was done."""
        self._ends = deque((time + seconds, *counts) for time, *counts in self._ends)  # type: ignore[misc]  # mypy forgets the length

    def rates(self) -> Rates | None:
        """Return what was done per second, from the end of the first batch on; None before the end of the second."""
        if len(self._ends) < 2:
            return None
        (start, *first), (end, *last) = self._ends[0], self._ends[-1]
        batches, samples, tokens = (
            (after - before) / max(end - start, 1e-9) for before, after in zip(first, last, strict=True)
        )
        return Rates(batches=batches, samples=samples, tokens=tokens)
