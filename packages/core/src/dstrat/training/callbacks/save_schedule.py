"""Schedule of a ModelCheckpoint by epochs, steps or time, and its background saves."""

from __future__ import annotations

import dataclasses
import math
from time import monotonic
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.data.limits import check_count
from dstrat.errors import ConflictError
from dstrat.training.arguments import read_duration
from dstrat.training.loops.stopping import Votes

if TYPE_CHECKING:
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.run import Run
    from dstrat.training.settings import Duration


class SavingTimes:
    """The batches and epochs after which a save is due, the same on all ranks.

    Args:
        every_n_epochs: Number of epochs between saves; 0 is never, and None every epoch without another interval.
        every_n_train_steps: Number of optimizer steps between saves; 0 is never.
        train_time_interval: Time between saves, at the end of a step that is common to all ranks.
        save_on_train_epoch_end: Whether to save at the end of an epoch's training or after its validation; None depends
            on the monitored value.

    Raises:
        RequestError: An argument is out of range.
        ConflictError: Two arguments exclude each other.
    """

    def __init__(
        self,
        every_n_epochs: int | None,
        every_n_train_steps: int | None,
        train_time_interval: Duration | None,
        save_on_train_epoch_end: bool | None,
    ) -> None:
        requested = {
            "every_n_epochs": every_n_epochs,
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
        }
        _check_one(requested)
        for name in ("every_n_epochs", "every_n_train_steps"):
            if requested[name] is not None:
                check_count(requested[name], name, 0)
        self.every_n_train_steps = every_n_train_steps or None
        is_default = all(value is None for value in requested.values())
        self.counts_epochs = is_default or bool(every_n_epochs)
        saves_between = self.every_n_train_steps is not None or train_time_interval is not None
        if save_on_train_epoch_end and saves_between:
            name = "every_n_train_steps" if every_n_train_steps else "train_time_interval"
            raise ConflictError(
                f"save_on_train_epoch_end=True is about epochs, and {name}={requested[name]!r} saves between them: "
                "leave one of them out"
            )
        self.every_n_epochs = 1 if every_n_epochs is None else every_n_epochs
        # False is no contradiction to saves between epochs: it only says that the end of an epoch has none.
        self.save_on_train_epoch_end = None if saves_between else save_on_train_epoch_end
        self.train_time_interval = (
            None if train_time_interval is None else read_duration(train_time_interval, "train_time_interval")
        )
        self._seconds = math.inf if self.train_time_interval is None else self.train_time_interval.total_seconds()
        self._deadline = math.inf
        self._seen_step = 0
        self._votes: Votes | None = None

    def begin(self, run: Run) -> None:
        """Start the intervals when training starts."""
        self._seen_step = run.fit_loop.global_step
        self._deadline = monotonic() + self._seconds
        self._votes = None
        if self.train_time_interval is not None:  # steps and epochs are the same on all ranks; times are not
            self._votes = Votes(run.strategy, run.fit_loop.batches_seen, beat=run.beat)

    def end(self) -> None:
        """Release the objects of the run."""
        self._votes = None

    def after_batch(self, run: Run) -> bool:
        """Return whether a save is due after a batch; with a time interval collective about twice a second."""
        if self._votes is not None:
            return self._time_is_up(run, self._votes)
        interval = self.every_n_train_steps
        if interval is None:
            return False
        step, seen = run.fit_loop.global_step, self._seen_step
        self._seen_step = step
        return step // interval != seen // interval  # a batch may take several steps in manual optimization

    def _time_is_up(self, run: Run, votes: Votes) -> bool:
        step = run.fit_loop.batches_seen
        if step < votes.next_at:  # a vote is a collective: not after each batch
            return False
        requests = run.is_global_zero and monotonic() >= self._deadline  # the clocks of ranks differ
        (is_up,) = votes.take(step, int(requests))
        if is_up:
            self._deadline = monotonic() + self._seconds
        return bool(is_up)

    def epoch_is_due(self, run: Run) -> bool:
        """Return whether a save is due at the end of the current epoch."""
        return self.counts_epochs and (run.fit_loop.epoch + 1) % self.every_n_epochs == 0

    def describe(self) -> str:
        """Return the arguments for the callback's ``state_key``."""
        description = f"every_n_epochs={self.every_n_epochs}, every_n_train_steps={self.every_n_train_steps}"
        return (
            description if self.train_time_interval is None else f"{description}, train_time_interval={self._seconds}"
        )


def _check_one(requested: dict[str, Any]) -> None:
    triggers = [f"{name}={value!r}" for name, value in requested.items() if value is not None and value != 0]
    if len(triggers) > 1:
        raise ConflictError(
            f"{' and '.join(triggers)} each determine when to save: keep one, or give each to its own ModelCheckpoint"
        )


# Saves in the background


class BackgroundSaves:
    """Background saves: wraps a strategy's checkpoint io in an :class:`AsyncCheckpointIO` until :meth:`end`.

    All saves of the run use it, so that only one is written at a time.

    Args:
        strategy: Of a run, after its setup.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        checkpoint_io = strategy.checkpoint_io
        # An existing AsyncCheckpointIO is the user's or another callback's: it is used, and not removed at the end.
        self._replaced = None if isinstance(checkpoint_io, AsyncCheckpointIO) else checkpoint_io
        self._io = checkpoint_io if isinstance(checkpoint_io, AsyncCheckpointIO) else AsyncCheckpointIO(checkpoint_io)
        self._put(self._io)

    def check(self) -> None:
        """Raise the error of a failed write, without waiting for one in flight.

        Raises:
            CheckpointError: A write failed.
        """
        self._io.check()

    def wait(self) -> None:
        """Wait for the write in flight.

        Raises:
            CheckpointError: The write failed.
        """
        self._io.wait()

    def end(self) -> None:
        """Wait for the write in flight, and restore the strategy's checkpoint io.

        Raises:
            CheckpointError: The write failed.
        """
        try:
            self._io.wait()
        finally:
            if self._replaced is not None:
                self._put(self._replaced)

    def _put(self, checkpoint_io: CheckpointIO) -> None:
        self._strategy.components = dataclasses.replace(self._strategy.components, checkpoint_io=checkpoint_io)


def wait_for_writes(strategy: Strategy) -> None:
    """Wait for a background write of the strategy's checkpoint io, if there is one.

    Raises:
        CheckpointError: A write in the background failed.
    """
    if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
        strategy.checkpoint_io.wait()
