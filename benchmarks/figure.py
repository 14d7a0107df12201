"""One measured figure next to its goal."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number, what it should be, and the samples that it came from.

    Attributes:
        name: What was measured.
        value: The number that the goal is about.
        unit: ``"x"`` for a ratio, otherwise what follows the number.
        goal: The bound; None where there is none.
        better: Whether a smaller or a larger value is better.
        peer: The same number of Lightning; None where it was not measured.
        medians: For each arm of the measurement its median, in ``arm_unit``.
        arm_unit: Unit of the medians and samples.
        samples: For each arm all that was measured, in the order of measurement.
        note: What has to be known in order to read the number.
    """

    name: str
    value: float
    unit: str = "x"
    goal: float | None = None
    better: Literal["smaller", "larger"] = "smaller"
    peer: float | None = None
    medians: Mapping[str, float] = field(default_factory=dict)
    arm_unit: str = "s"
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better == "smaller" else self.value >= self.goal


def medians_of(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each arm."""
    return {arm: statistics.median(values) for arm, values in samples.items()}


def ratio_of(samples: Mapping[str, Sequence[float]], arm: str, over: str) -> float:
    """Return the median of the ratios of two arms, each taken within one repeat."""
    return statistics.median(a / b for a, b in zip(samples[arm], samples[over], strict=True))
