"""Progress of an evaluation over one or several loaders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.training.callbacks.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence


class EvaluationProgress:
    """How far validation, testing or prediction is, over all loaders; with several its title says which one is read.

    Args:
        title: What the loop does.
        counts: Number of batches of each loader; None where it is unknown.
        batches_per_item: Number of batches that end together.
    """

    def __init__(self, title: str, counts: Sequence[int | None], batches_per_item: int = 1) -> None:
        self._title, self._counts, self._batches_per_item = title, counts, batches_per_item
        known = [count for count in counts if count is not None]
        self._progress = Progress(title, sum(known) if len(known) == len(counts) else None)
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
