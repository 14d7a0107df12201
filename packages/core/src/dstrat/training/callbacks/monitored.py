"""Monitored values of a callback, and the ranking of checkpoints by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dstrat.training.trainer import Trainer


def is_new(monitor: str, trainer: Trainer) -> bool:
    """Return whether the epoch of training or evaluation that has just ended logged the value.

    Args:
        monitor: Its name; one that is logged per step too is known by the name without suffix.
        trainer: Has the values.
    """
    latest = trainer.metrics.latest_epoch
    return monitor in latest or f"{monitor}_epoch" in latest


def is_overdue(trainer: Trainer) -> bool:
    """Return whether every value should be known at the end of this epoch of training.

    That is so after an epoch that was not broken off and in which validation was due.
    """
    every = trainer.check_val_every_n_epoch  # None where validation is due after a number of batches of any epoch
    return was_completed(trainer) and every is not None and (trainer.current_epoch + 1) % every == 0


def was_completed(trainer: Trainer) -> bool:
    """Return whether the epoch of training that ends was not broken off, as ``max_steps`` and ``should_stop`` do."""
    return trainer.fit_loop.epochs_done > trainer.current_epoch


# Ranking of checkpoints: the best k by a score.


Mode = Literal["min", "max"]


class Ranking:
    """Paths with their scores, at most so many of them; NaN ranks below everything.

    Args:
        limit: Number of paths to keep, -1 for all.
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
        """The path that the next one drives out, None while there is room."""
        is_full = 0 < self._limit <= len(self._scores)
        return max(self._scores, key=lambda path: self._rank(self._scores[path])) if is_full else None

    def accepts(self, score: float) -> bool:
        """Return whether a new path with that score would be kept."""
        if self._limit == 0:
            return False
        return self.replaceable is None or self.is_better(score, than=self._scores[self.replaceable])

    def is_better(self, score: float, *, than: float | None) -> bool:
        """Return whether a score is better than another one; every number is better than none."""
        return not math.isnan(score) and (than is None or self._rank(score) < self._rank(than))

    def add(self, path: str, score: float) -> list[str]:
        """Keep a path, and return those that it drives out."""
        driven_out = []
        while self.replaceable is not None:
            driven_out.append(self.replaceable)
            del self._scores[self.replaceable]
        self._scores[path] = score
        return [old for old in driven_out if old != path]

    def restore(self, scores: Mapping[str, float]) -> None:
        """Take back the paths of a run that goes on."""
        self._scores = dict(scores)

    def _rank(self, score: float) -> float:
        if math.isnan(score):
            return math.inf
        return score if self._mode == "min" else -score


def as_tensor(score: float) -> Tensor:
    """Return a score as users see it: a tensor without dimensions, like the logged values that it was one of."""
    from torch import float64, tensor

    return tensor(score, dtype=float64)  # which loses nothing of a float
