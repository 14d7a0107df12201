"""Joint decisions of all ranks, after the same step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy

SECONDS_BETWEEN_VOTES = 0.5
MOST_STEPS_BETWEEN_VOTES = 500


class Votes:
    """Turns what any process wishes into what all of them do.

    The processes vote by one small reduction about every half second, at step numbers that the last vote fixed for
    all of them, so that they agree without a collective in every step.

    Args:
        strategy: Whose processes vote.
        step: Number of batches trained on already, the same in every process.

    Attributes:
        next_at: Number of batches after which the processes vote next.
    """

    def __init__(self, strategy: Strategy, step: int = 0) -> None:
        self._strategy = strategy
        from dstrat.builtin.launchers.progress import beat  # only runs need it

        self._beat = beat
        self._alone = strategy.world_size == 1
        self.next_at = step + 1
        self._last_vote = (step, time.monotonic())

    def take(self, step: int, *wishes: int) -> tuple[int, ...]:
        """Vote; collective.

        Args:
            step: Number of batches trained on.
            *wishes: What this process wishes, each as a number of which 0 means no.

        Returns:
            The largest number that any process gave, for each of the wishes.
        """
        if self._alone:
            return wishes
        last_step, last_time = self._last_vote
        seconds_per_step = (time.monotonic() - last_time) / max(1, step - last_step)
        wanted = min(MOST_STEPS_BETWEEN_VOTES, 1 + int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6)))
        ballot = torch.tensor([*wishes, -wanted], device=self._strategy.root_device)
        *agreed, steps = self._strategy.reduce(ballot, reduce_op="max").tolist()
        self._beat()
        self.next_at = step - steps
        self._last_vote = (step, time.monotonic())
        return tuple(agreed)
