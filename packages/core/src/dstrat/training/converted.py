"""What a checkpoint of another program lacks of a training that a fit goes on with."""

from __future__ import annotations

from typing import Any

from dstrat.training.loops.position import Position


def training_entries(*, epochs_done: int, global_step: int, batches_seen: int) -> dict[str, Any]:
    """Return the entries of a checkpoint that lead a fit to the beginning of an epoch, with nothing logged yet.

    Args:
        epochs_done: Number of epochs whose batches have all been trained on.
        global_step: Number of optimizer steps taken.
        batches_seen: Number of batches trained on in all epochs.
    """
    counters = {"epochs_done": epochs_done, "global_step": global_step, "steps_before": global_step}
    return {
        "precision": {},
        "loops": {**Position().state_dict(), **counters, "batches_seen": batches_seen, "loader_length": None},
        "metrics": {"values": {}, "shown": [], "written": []},
    }
