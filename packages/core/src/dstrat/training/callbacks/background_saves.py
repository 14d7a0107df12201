"""Letting a run write its checkpoints in the background."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.background import AsyncCheckpointIO

if TYPE_CHECKING:
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.strategy import Strategy


class BackgroundSaves:
    """Puts an :class:`AsyncCheckpointIO` around a strategy's checkpoint io, until :meth:`end`.

    All saves of the run go through it, so that two of them are never written at once.

    Args:
        strategy: Of a run that has been set up.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        given = strategy.checkpoint_io
        self._replaced = None if isinstance(given, AsyncCheckpointIO) else given  # another callback's, or the user's
        self._io = given if isinstance(given, AsyncCheckpointIO) else AsyncCheckpointIO(given)
        self._put(self._io)

    def check(self) -> None:
        """Raise the error of a write that has failed; does not wait.

        Raises:
            CheckpointError: It failed.
        """
        self._io.check()

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: It failed.
        """
        self._io.wait()

    def end(self) -> None:
        """Wait, and give the strategy its own checkpoint io back.

        Raises:
            CheckpointError: What was being written failed.
        """
        try:
            self._io.wait()
        finally:
            if self._replaced is not None:
                self._put(self._replaced)

    def _put(self, checkpoint_io: CheckpointIO) -> None:
        self._strategy.parts = dataclasses.replace(self._strategy.parts, checkpoint_io=checkpoint_io)


def wait_for_writes(strategy: Strategy) -> None:
    """Wait until the strategy's checkpoint io has nothing left to write.

    Raises:
        CheckpointError: A write in the background failed.
    """
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        strategy.checkpoint_io.wait()
