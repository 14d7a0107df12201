"""Where a function of the kit runs: one rank of a job of warm processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.testing.loopback import LoopbackCluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank of a job.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job.
        folder: Shared by the ranks, gone after the job.
        cluster: What tells a strategy where it is.
    """

    rank: int
    world_size: int
    folder: Path
    cluster: LoopbackCluster
