"""What grows with the number of ranks: dstrat's own coordination, and its start beside torchrun's."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure
from job import HERE, run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from settings import Settings

RANKS = (2, 8, 16, 32, 64)
STEP = 50.0
"""Milliseconds of a step that the goals refer to."""
SECONDS_BETWEEN_VOTES = 0.5


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure the coordination on several numbers of ranks, and the start on the largest."""
    sizes = RANKS[:3] if settings.quick else RANKS
    found = {size: coordination(size) for size in sizes}
    largest = sizes[-1]
    for name in ("catalog", "vote", "metrics", "plan of a save", "reading reports"):
        costs = [found[size][name]["cpu"] for size in sizes]
        formula, at_1024 = extrapolate(sizes, costs)
        per_step = costs[-1] * STEP / (1000 * SECONDS_BETWEEN_VOTES) if name == "vote" else None
        yield Figure(
            name=f"coordination of {largest} ranks: {name}, processor time of a call",
            value=costs[-1] if per_step is None else per_step,
            unit="ms" if per_step is None else "ms in each step",
            goal=None if per_step is None else STEP / 100,
            medians={f"{size} ranks": cost for size, cost in zip(sizes, costs, strict=True)},
            arm_unit="ms",
            note=f"mean of the ranks; {formula}, which is {at_1024:.2g} ms for 1,024; the clock of rank 0 says "
            f"{found[largest][name]['wall']:.2g} ms, with {largest} processes on the cores of this machine",
        )
    yield Figure(
        name="plan of a save of 600 tensors, computed for 1,024 ranks",
        value=_found("plan"),
        unit="ms",
        note="measured, in one process that has the messages of 1,024",
    )
    yield from _start(largest)


def coordination(num_ranks: int) -> dict[str, Any]:
    """Return milliseconds of the parts of the coordination in a job of that many forked ranks."""
    found: dict[str, Any] = _found(str(num_ranks))
    return found


def _found(what: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        run_job([sys.executable, HERE / "scaling_rank.py", what, out], patience=170)
        return json.loads(out.read_text())


def extrapolate(sizes: Sequence[int], costs: Sequence[float]) -> tuple[str, float]:
    """Return the formula that fits best, a constant with a linear or a logarithmic part, and its value for 1,024."""
    fits = []
    for name, function in (("N", float), ("log2 N", math.log2)):
        x = [function(size) for size in sizes]
        mean_x, mean_y = sum(x) / len(x), sum(costs) / len(costs)
        slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, costs, strict=True)) / sum(
            (a - mean_x) ** 2 for a in x
        )
        constant = mean_y - slope * mean_x
        error = sum((constant + slope * a - b) ** 2 for a, b in zip(x, costs, strict=True))
        fits.append((error, f"{constant:.3g} + {slope:.3g} {name} ms", constant + slope * function(1024)))
    _, formula, value = min(fits)
    return formula, value


def _start(num_ranks: int) -> Iterator[Figure]:
    by_hand, cpu_by_hand = start("torchrun", num_ranks)
    for method in ("popen", "forkserver"):
        seconds, cpu = start(method, num_ranks)
        yield Figure(
            name=f"start of {num_ranks} ranks with {method} until all have done a step, above torchrun's",
            value=seconds - by_hand,
            unit="s",
            goal=1.0,
            medians={"torchrun": by_hand, method: seconds},
            samples={"torchrun": [by_hand], method: [seconds]},
            note=f"processor for each rank: {cpu:.2f} s, and {cpu_by_hand:.2f} s by hand",
        )


def start(how: str, num_ranks: int) -> tuple[float, float]:
    """Return the seconds until the last rank has done a step, and those of the processor for each rank.

    Args:
        how: ``"torchrun"``, or the start method of the strategy.
        num_ranks: Number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "done")
        if how == "torchrun":
            command = torchrun(num_ranks, "scaling_start_by_hand.py", str(out))
        else:
            command = [sys.executable, str(HERE / "scaling_start.py"), str(num_ranks), how, str(out)]
        begun = time.time()
        run_job(command, patience=170)
        lines = [path.read_text().split() for path in Path(folder).glob("done.*")]
    if len(lines) != num_ranks:
        raise RuntimeError(f"{how}: {len(lines)} of {num_ranks} ranks have done a step")
    return max(float(moment) for moment, _ in lines) - begun, sum(float(cpu) for _, cpu in lines) / num_ranks
