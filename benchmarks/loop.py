"""What a step of the loops costs over a hand-written loop with the same DataLoader: time, calls and memory.

CPU, a tiny MLP, one device, one thread; the arms run in turn in a process of their own.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure, medians_of, ratio_of
from job import run_job, script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

Samples = dict[str, list[float]]

EXTRAS = {
    "bare": ("extra time per training step", 30),
    "logging": ("extra time per training step that logs two values", 60),
    "defaults": ("extra time per training step that logs two values, with the default callbacks and logger", 100),
}
MEGABYTE = 1024 * 1024


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure calls, time and memory."""
    yield from _calls(settings)
    for what, (name, goal) in EXTRAS.items():
        yield _extra(name, goal, _times(what, settings))
    yield _validation(_times("validation", settings))
    yield from _memory(settings)


def _extra(name: str, goal: float, samples: dict[str, Samples]) -> Figure:
    wall, cpu = samples["wall"], samples["cpu"]
    return Figure(
        name=f"{name}, over by hand",
        value=_difference(wall, "dstrat"),
        unit="us",
        goal=goal,
        peer=_difference(wall, "lightning") if "lightning" in wall else None,
        medians=medians_of(wall),
        arm_unit="us",
        samples=wall,
        note=f"{_difference(cpu, 'dstrat'):.1f} us of processor time, which other programs disturb less; "
        f"of two arms by hand one has {2 * _difference(wall, 'by hand again'):.1f} us more than the other",
    )


def _validation(samples: dict[str, Samples]) -> Figure:
    wall, cpu = samples["wall"], samples["cpu"]
    return Figure(
        name="validation of tiny batches whose loss is averaged, over by hand",
        value=ratio_of(wall, "dstrat", over="by hand"),
        goal=1.05,
        peer=ratio_of(wall, "lightning", over="by hand") if "lightning" in wall else None,
        medians=medians_of(wall),
        arm_unit="us",
        samples=wall,
        note=f"{ratio_of(cpu, 'dstrat', over='by hand'):.3f} of its processor time; "
        f"a second arm by hand has {ratio_of(wall, 'by hand again', over='by hand'):.3f}",
    )


def _calls(settings: Settings) -> Iterator[Figure]:
    """Count the calls, which are the same in every run on any machine: what a regression shows in first."""
    del settings
    found = _run("loop_calls.py", [], python=sys.executable)
    for what, arms in found.items():
        yield Figure(
            name=f"extra function calls per step, over by hand ({what})",
            value=arms["dstrat"] - arms["by hand"],
            unit="calls",
            medians=arms,
            arm_unit="calls",
            samples={arm: [calls] for arm, calls in arms.items()},
            note="of functions written in Python or C; exact",
        )


def _memory(settings: Settings) -> Iterator[Figure]:
    """Compare the memory along one long run of each arm."""
    most = 10_000 if settings.quick else 100_000
    arms = {"by hand": sys.executable, "dstrat": sys.executable}
    if settings.peer and not settings.quick:
        arms["lightning"] = str(settings.peer)
    found = {arm: _run("loop_memory.py", [arm, str(most)], python=python) for arm, python in arms.items()}
    sizes = {arm: {int(n): size / MEGABYTE for n, (size, _) in at.items()} for arm, at in found.items()}
    extra = {arm: {n: size - sizes["by hand"][n] for n, size in of.items()} for arm, of in sizes.items()}
    grown = {arm: of[most] - of[1000] for arm, of in extra.items()}
    after = ", ".join(f"{size:.2f} MiB after {n}" for n, size in extra["dstrat"].items())
    blocks = found["dstrat"][str(most)][1] - found["dstrat"]["1000"][1]
    yield Figure(
        name=f"growth of the extra host memory from 1000 to {most} steps with all defaults",
        value=grown["dstrat"],
        unit="MiB",
        goal=1,
        peer=grown.get("lightning"),
        medians={arm: of[most] for arm, of in sizes.items()},
        arm_unit="MiB",
        samples={arm: list(of.values()) for arm, of in sizes.items()},
        note=f"extra over by hand: {after} steps; Python holds {blocks} more small objects at the end than at 1000",
    )


def _times(what: str, settings: Settings) -> dict[str, Samples]:
    steps, repeats = 500, 10 if settings.quick else 100
    if what == "validation":
        steps, repeats = (1000, 5) if settings.quick else (10_000, 25)
    python = str(settings.peer or sys.executable)
    return _run("loop_times.py", [f"--what={what}", f"--steps={steps}", f"--repeats={repeats}", "--out"], python=python)


def _run(program: str, arguments: list[str], *, python: str) -> dict[str, Any]:
    """Run one of the programs beside this one; return what it writes into the file that is its last argument."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        run_job(script(program, *arguments, str(out), python=python), patience=1800)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def _difference(samples: Samples, arm: str) -> float:
    """Return the median of how much an arm takes longer than the two by hand, each taken within one repeat."""
    by_hand = zip(samples["by hand"], samples["by hand again"], strict=True)
    return statistics.median(a - (b + c) / 2 for a, (b, c) in zip(samples[arm], by_hand, strict=True))
