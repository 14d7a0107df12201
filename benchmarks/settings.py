"""What the user of the benchmarks asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - dataclasses look at it


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to measure.

    Attributes:
        quick: Whether fewer and shorter repeats are enough.
        peer: The Python of an environment with Lightning; None leaves Lightning out.
    """

    quick: bool
    peer: Path | None
