"""Monitored values of a callback, and the ranking of checkpoints by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from dstrat.training.metrics.values import extended

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dstrat.training.run import Run


def new_value(monitor: str, run: Run) -> float | None:
    """Return the value that rank 0 has logged in the latest epoch of training or evaluation; None without; collective.

    Args:
        monitor: The logged name, without the suffix ``_epoch``.
        run: Has the values.
    """
    latest = run.metrics.latest_epoch
    value = latest.get(monitor, latest.get(extended(monitor, "_epoch"))) if run.is_global_zero else None
    # Other ranks may lack it, with rank_zero_only=True, and all have to act alike.
    shared: float | None = run.strategy.broadcast(None if value is None else float(value))
    return shared


def is_overdue(run: Run) -> bool:
    """Return whether all values must be logged by the end of this epoch: it was completed, with a validation."""
    every = run.settings.evaluation.check_val_every_n_epoch  # None: validation is independent of epochs
    has_ended = was_completed(run) and not run.fit_loop.ended_by_hook
    return has_ended and every is not None and (run.fit_loop.epoch + 1) % every == 0


def was_completed(run: Run) -> bool:
    """Return whether the ending epoch was completed, not stopped by ``max_steps`` or ``should_stop``."""
    return run.fit_loop.epochs_done > run.fit_loop.epoch


# Ranking of checkpoints


Mode = Literal["min", "max"]


class Ranking:
    """The best k paths by score; NaN is the worst score.

    Args:
        limit: The k; -1 is no limit.
        mode: Whether the smallest or the largest score is the best.
    """

    def __init__(self, limit: int, mode: Mode) -> None:
        self._limit, self._mode = limit, mode
        self._scores: dict[str, float] = {}

    @property
    def scores(self) -> dict[str, float]:
        """The score of each path."""
        return dict(self._scores)

    @property
    def replaceable(self) -> str | None:
        """The path that the next one evicts; None while the limit is not reached."""
        is_full = 0 < self._limit <= len(self._scores)
        return max(self._scores, key=lambda path: self._rank(self._scores[path])) if is_full else None

    def accepts(self, score: float) -> bool:
        """Return whether a new path with a score would be among the best."""
        if self._limit == 0:
            return False
        return self.replaceable is None or self.is_better(score, than=self._scores[self.replaceable])

    def is_better(self, score: float, *, than: float | None) -> bool:
        """Return whether a score is better than another one; every number is better than None."""
        return not math.isnan(score) and (than is None or self._rank(score) < self._rank(than))

    def add(self, path: str, score: float) -> list[str]:
        """Add a path, and return the evicted ones."""
        evicted = []
        while self.replaceable is not None:  # several, if a resumed run has a lower limit
            evicted.append(self.replaceable)
            del self._scores[self.replaceable]
        self._scores[path] = score
        return [old for old in evicted if old != path]

    def restore(self, scores: Mapping[str, float]) -> None:
        """Restore the paths of a resumed run."""
        self._scores = dict(scores)

    def _rank(self, score: float) -> float:
        if math.isnan(score):
            return math.inf
        return score if self._mode == "min" else -score


def as_tensor(score: float) -> Tensor:
    """Return a score as a 0-dim tensor, the type of logged values."""
    from torch import float64, tensor

    return tensor(score, dtype=float64)  # the exact value of a Python float
