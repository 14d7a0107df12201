"""Counters of a fit, and those that a checkpoint has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Phase = Literal["batch_end", "validated", "done"]
"""What has been done after a batch: its hooks, validation where it was due, everything."""

_SAVED = (
    "epochs_done",
    "global_step",
    "batches_seen",
    "batches_done",
    "in_group",
    "steps_before",
    "is_last_batch",
    "phase",
)


class Position:
    """The counters of a fit; a base class of its loop rather than a part, as a look-up less in each step shows.

    Attributes:
        epoch: Index of the epoch, from 0.
        epochs_done: Number of epochs whose batches have all been trained on.
        global_step: Number of optimizer steps taken.
        batch_idx: Index of the batch in the epoch.
        is_last_batch: Whether it is the epoch's last.
        batches_seen: Number of batches trained on in all epochs.
        batches_done: Number of batches trained on in this epoch.
        in_group: Number of batches whose gradients wait for an optimizer step.
        steps_before: Number of optimizer steps before the batch.
        phase: How much of what follows a batch or an epoch has been done.
        is_in_batch: Whether a batch is being trained on, which then does not count as done.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.epochs_done = 0
        self.global_step = 0
        self.batch_idx = 0
        self.is_last_batch = False
        self.batches_seen = 0
        self.batches_done = 0
        self.in_group = 0
        self.steps_before = 0
        self.phase: Phase = "done"
        self.is_in_batch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint, the same in every process."""
        return {name: getattr(self, name) for name in _SAVED} | {"is_last_batch": self.ends_epoch}

    @property
    def ends_epoch(self) -> bool:
        """Whether no batch of the epoch is left to train on."""
        return self.is_last_batch and not self.is_in_batch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back the counters."""
        for name in _SAVED:
            setattr(self, name, state[name])
        self.epoch = self.epochs_done
