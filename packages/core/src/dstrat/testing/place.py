"""Context of a function of the kit: one rank of a job of warm processes."""

from __future__ import annotations

import time
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

    def meet(self, name: str, word: str = "here", *, seconds: float = 3.0) -> set[str]:
        """Leave a word for the other ranks, and wait for theirs without any strategy.

        Args:
            name: Tells this meeting from others in the job.
            word: Letters.
            seconds: How long it waits for ranks that may never come.

        Returns:
            The words of those that came.
        """
        (self.folder / f"{name} {self.rank} {word}").touch()
        deadline = time.monotonic() + seconds
        while len(left := list(self.folder.glob(f"{name} *"))) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
        return {path.name.rpartition(" ")[2] for path in left}
