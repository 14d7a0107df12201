"""The processor's instructions of a step, counted by valgrind: the same to 0.1 % whatever else the machine does.

Needs valgrind.  torch's import alone takes it a minute, so that this is measured only when it is asked for.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure
from job import run_job, script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

WARMUP, STEPS = 30, 200
MEASURED = ("training", "training that logs two values", "validation")


def measure(settings: Settings) -> Iterator[Figure]:
    """Count the instructions of each arm."""
    del settings
    if shutil.which("valgrind") is None:
        raise RuntimeError("counting instructions needs valgrind: apt-get install valgrind")
    by_hand: dict[str, float] = {}
    for what in MEASURED:
        hand = "validation" if what == "validation" else "training"
        by_hand[hand] = by_hand.get(hand) or _instructions(hand, "by hand")
        ours = _instructions(what, "dstrat")
        yield Figure(
            name=f"instructions per step of {what}, over by hand",
            value=ours / by_hand[hand],
            medians={"by hand": by_hand[hand] / 1000, "dstrat": ours / 1000},
            arm_unit="thousand",
            samples={"by hand": [by_hand[hand]], "dstrat": [ours]},
        )


def _instructions(what: str, arm: str) -> float:
    """Return the instructions of a step: counted from one call of getppid to one of getpgrp, which the steps make."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counted")
        valgrind = ["valgrind", "--tool=callgrind", "--zero-before=os_getppid", "--dump-before=os_getpgrp"]
        run_job([*valgrind, f"--callgrind-out-file={out}", *script("loop_instructions.py", what, arm)], patience=1200)
        lines = Path(f"{out}.1").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("summary:")).split()[1]) / STEPS


def main() -> None:
    """Run an arm; arguments: what, and the arm."""
    import torch
    from loop_arms import training_arms, validation_arms

    what, arm = sys.argv[1:]
    torch.set_num_threads(1)
    arms = (
        validation_arms(with_peer=False)
        if what == "validation"
        else training_arms(logs=what != "training", defaults=False, with_peer=False)
    )
    gc.disable()
    arms[arm](WARMUP + STEPS + 1, _mark)


def _mark(step: int) -> None:
    """Call what valgrind waits for."""
    if step == WARMUP:
        os.getppid()
    elif step == WARMUP + STEPS:
        os.getpgrp()


if __name__ == "__main__":
    main()
