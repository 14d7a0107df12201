"""Lookup of the value that a callback monitors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
