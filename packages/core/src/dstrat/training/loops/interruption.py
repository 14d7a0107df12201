"""Stopping on SIGINT and SIGTERM: at the end of a step, and of the same step in every process."""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from dstrat.interfaces.strategy import Strategy

SECONDS_BETWEEN_VOTES = 0.5
MOST_STEPS_BETWEEN_VOTES = 500
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A SIGINT on which all processes agreed: they have stopped after the same step, and can still communicate."""


class Terminated(SystemExit):
    """A SIGTERM on which all processes agreed."""


class Interruption:
    """Turns a first SIGINT or SIGTERM into a vote to stop; a second one interrupts at once.

    The processes vote by one small reduction about every half second, at step numbers that the last vote fixed for
    all of them, so that they stop at the same step without a collective in every step.

    Args:
        strategy: Whose processes vote.
        step: Number of batches trained on already, the same in every process.
    """

    def __init__(self, strategy: Strategy, step: int = 0) -> None:
        self._strategy = strategy
        self._alone = strategy.world_size == 1
        self._requested = 0
        self._previous: dict[int, Any] = {}
        self._next_vote = step + 1
        self._last_vote = (step, time.monotonic())

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        self._requested = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def check(self, step: int) -> None:
        """Raise what the signal asks for, if the processes agree to stop after this many batches.

        Raises:
            Interrupted: For SIGINT.
            Terminated: For SIGTERM, with code 143.
        """
        if self._alone:
            agreed = self._requested
        elif step >= self._next_vote:
            agreed = self._vote(step)
        else:
            return
        if agreed:
            _raise(agreed)

    def conclude(self, step: int) -> None:
        """Do the same after the last batch, whenever the next vote would have been."""
        self._next_vote = step
        self.check(step)

    def _vote(self, step: int) -> int:
        last_step, last_time = self._last_vote
        now = time.monotonic()
        seconds_per_step = (now - last_time) / max(1, step - last_step)
        wanted = min(MOST_STEPS_BETWEEN_VOTES, 1 + int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6)))
        ballot = torch.tensor([self._requested, -wanted], device=self._strategy.root_device)
        agreed, steps = self._strategy.reduce(ballot, reduce_op="max").tolist()
        self._next_vote = step - steps
        self._last_vote = (step, time.monotonic())
        return int(agreed)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise Interrupted
    raise Terminated(128 + number)
