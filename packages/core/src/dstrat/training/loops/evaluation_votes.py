"""Stopping an evaluation in all processes at once, although they may have different numbers of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dstrat.training.loops.interruption import stop_by
from dstrat.training.loops.votes import Votes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.loops.interruption import Interruption

B = TypeVar("B")


class EvaluationVotes:
    """Lets several processes agree, about every half second, on whether a signal ends their evaluation.

    Those that are through with their batches go on voting until all are.

    Args:
        strategy: Whose processes evaluate.
        interruption: Knows the signals of this process.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption) -> None:
        self._votes, self._interruption = Votes(strategy), interruption
        self._done = 0

    def between(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield the batches of a loader, and vote between them; collective."""
        for batch in batches:
            yield batch
            self.count()

    def count(self) -> None:
        """Take note of a batch, and vote when it is time; collective then."""
        self._done += 1
        if self._done >= self._votes.next_at:
            self._vote(goes_on=True)

    def finish(self) -> None:
        """Vote until every process is through with its loaders; collective."""
        while self._vote(goes_on=False):
            self._done = self._votes.next_at  # at the pace of the others, so that these are not asked more often

    def _vote(self, *, goes_on: bool) -> bool:
        """Vote; return whether any process will again."""
        signal, anyone_goes_on = self._votes.take(self._done, self._interruption.requested, goes_on)
        if signal:
            stop_by(signal)
        return bool(anyone_goes_on)
