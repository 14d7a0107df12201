"""A converted checkpoint, with what people want to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        checkpoint: Under our keys; a fit can go on from it where the source has optimizers.
        taken: What was taken over, for people.
        left_out: What was not, and why.
    """

    checkpoint: dict[str, Any]
    taken: list[str]
    left_out: list[str]


def as_conversion(checkpoint: dict[str, Any]) -> Conversion:
    """Return what a checkpoint io has converted, with what people want to know of it."""
    taken = [
        f"{len(checkpoint['state_dict'])} weights",
        f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}",
    ]
    for key, what in (("optimizers", "optimizer"), ("lr_schedulers", "scheduler")):
        count = len(checkpoint.get(key, ()))
        taken += [f"{count} {what}{'s' * (count > 1)}"] if count else []
    return Conversion(checkpoint=checkpoint, taken=taken, left_out=[])
