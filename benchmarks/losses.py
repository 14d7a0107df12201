"""Losses of ddp on 1, 2 and 4 ranks against hand-written loops, with the same global batch."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure
from job import run_job, script, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

GLOBAL_BATCH = 64
STEPS = 20


def measure(settings: Settings) -> Iterator[Figure]:
    """Compare the losses: of SGD with those of one device, of AdamW with those by hand on as many ranks."""
    alone = _losses("sgd", 1, by_hand=True)
    yield _figure(
        f"against one device, {STEPS} steps (sgd)",
        {f"{n} ranks": _difference(_losses("sgd", n), alone) for n in (1, 2, 4)},
    )
    if settings.quick:
        return
    # A gradient that is zero but for rounding gives a whole step of AdamW, so that it depends on the processor's
    # kernels for a rank's batch how far a loop on several ranks is from one device, by hand too.
    by_hand = {n: _losses("adamw", n, by_hand=True) for n in (1, 2, 4)}
    yield _figure(
        f"against as many by hand, {STEPS} steps (adamw)",
        {f"{n} ranks": _difference(_losses("adamw", n), by_hand[n]) for n in (1, 2, 4)},
        note=f"; by hand, 2 ranks differ from one device by {_difference(by_hand[2], by_hand[1]):.0e}",
    )


def _figure(name: str, differences: dict[str, float], note: str = "") -> Figure:
    return Figure(
        name=f"losses of ddp on 1, 2, 4 ranks {name}",
        value=max(differences.values()),
        unit="relative",
        goal=1e-6,
        medians=differences,
        arm_unit="relative",
        note=f"largest relative difference of a loss, float32{note}",
    )


def _losses(optimizer: str, ranks: int, *, by_hand: bool = False) -> list[float]:
    """Return the loss of each step over the global batch, which is the mean of those of the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--steps={STEPS}", f"--batch-size={GLOBAL_BATCH // ranks}", f"--devices={ranks}"]
        arguments += [f"--optimizer={optimizer}", f"--losses={folder}/"]
        if not by_hand:
            command = script("with_dstrat.py", *arguments)
        elif ranks == 1:
            command = script("by_hand.py", *arguments)
        else:
            command = torchrun(ranks, "by_hand.py", *arguments)
        run_job(command)
        of_ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    return [sum(losses) / ranks for losses in zip(*of_ranks, strict=True)]


def _difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))
