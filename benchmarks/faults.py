"""Things that go wrong in a rank in the middle of a training."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = {
    "raises": (1, "rank 1 raises"),
    "killed": (1, "rank 1 is killed"),
    "busy": (0, "rank 0 raises while rank 1 is busy"),
    "stubborn": (1, "rank 1 raises, rank 0 is busy and ignores SIGTERM"),
}
"""For each fault, the rank that fails, and what happens."""

STEP = 5


def fault_on_step(fault: str, fault_time: str | None) -> Callable[[int], None]:
    """Return what makes a rank fail, or stand in the way of ending the job, in a step of the training.

    Args:
        fault: One of ``FAULTS``.
        fault_time: Where the failing rank writes the time.
    """
    culprit, _ = FAULTS[fault]
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0"))  # Lightning sets only the second

    def on_step(step: int) -> None:
        if step != STEP:
            return
        if rank == culprit:
            time.sleep(0.5)  # until the other rank is where it should be
            Path(fault_time or os.devnull).write_text(repr(time.time()))
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"rank {rank} fails, as it was asked to")
        if fault == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if fault in ("busy", "stubborn"):
            _work(60)

    return on_step


def _work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.01)
