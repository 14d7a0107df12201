"""Losses of ddp on 1, 2 and 4 ranks against one device and a hand-written loop, with the same global batch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure
from job import run_job, script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

GLOBAL_BATCH = 64
STEPS = 20


def measure(settings: Settings) -> Iterator[Figure]:
    """Compare the losses, with two optimizers."""
    for optimizer in ("sgd",) if settings.quick else ("sgd", "adamw"):
        alone = _losses("by_hand.py", 1, optimizer)
        apart = {n: _difference(_losses("with_dstrat.py", n, optimizer), alone) for n in (1, 2, 4)}
        yield Figure(
            name=f"losses of ddp on 1, 2, 4 ranks against one device, {STEPS} steps ({optimizer})",
            value=max(apart.values()),
            unit="relative",
            goal=1e-6,
            medians={f"{n} ranks": value for n, value in apart.items()},
            arm_unit="relative",
            note="largest relative difference of a loss, float32",
        )


def _losses(program: str, ranks: int, optimizer: str) -> list[float]:
    """Return the loss of each step over the global batch, which is the mean of those of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--steps={STEPS}", f"--batch-size={GLOBAL_BATCH // ranks}", f"--devices={ranks}"]
        run_job(script(program, *arguments, f"--optimizer={optimizer}", f"--losses={folder}/"))
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [sum(losses) / ranks for losses in zip(*of_ranks, strict=True)]


def _difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
