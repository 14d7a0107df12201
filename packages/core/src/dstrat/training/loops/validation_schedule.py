"""Schedule of validation during a fit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dstrat.data.limits import limit_of
from dstrat.errors import MisuseError
from dstrat.training.duration import read_duration

if TYPE_CHECKING:
    from dstrat.training.trainer import Trainer


class ValidationSchedule:
    """Says after which batches validation is due.

    Args:
        trainer: Its ``val_check_interval`` and ``check_val_every_n_epoch``.
        num_batches: Number of training batches in an epoch, None where unknown.

    Raises:
        MisuseError: Validation would never run.
    """

    def __init__(self, trainer: Trainer, num_batches: int | None) -> None:
        interval = trainer.val_check_interval
        self._epochs = trainer.check_val_every_n_epoch
        self._batches: int | None = None
        self._seconds: float | None = None
        self._last_time = time.monotonic()
        if isinstance(interval, int | float):
            if interval != 1.0 or isinstance(interval, int):
                self._batches = self._count(interval, num_batches)
        elif interval is not None:
            self._seconds = read_duration(interval, "val_check_interval").total_seconds()

    def _count(self, interval: float, num_batches: int | None) -> int:
        if self._epochs is not None and num_batches is not None and interval > num_batches:
            raise MisuseError(
                f"val_check_interval={interval!r} is more than the {num_batches} training batches of an epoch: "
                "validation would never run; pass check_val_every_n_epoch=None too, to count batches across epochs"
            )
        if self._epochs is None:
            return int(interval)
        return max(1, limit_of(interval, num_batches, "val_check_interval") or 1)

    def is_due(self, *, batches_done: int, is_last: bool, epoch: int, batches_seen: int, batches: int = 1) -> bool:
        """Return whether validation runs after a batch, or after the last of several that were one call.

        Args:
            batches_done: Number of batches of the epoch, with this one.
            is_last: Whether it is the epoch's last.
            epoch: Index of the epoch.
            batches_seen: Number of batches in all epochs, with this one.
            batches: Number of batches since validation could last have run.
        """
        if self._seconds is not None:
            return False
        if self._epochs is None:
            return is_last if self._batches is None else batches_seen % self._batches < batches
        if (epoch + 1) % self._epochs != 0:
            return False
        return is_last if self._batches is None else batches_done % self._batches < batches

    @property
    def is_timed(self) -> bool:
        """Whether validation runs by the clock."""
        return self._seconds is not None

    @property
    def time_is_up(self) -> bool:
        """Whether validation by the clock is due in this process."""
        return self._seconds is not None and time.monotonic() - self._last_time >= self._seconds

    def note_run(self) -> None:
        """Take note that validation has run."""
        self._last_time = time.monotonic()
