"""Wall time of a short job on two ranks, from the command to its end, over torchrun and a hand-written loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import run_job, script, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

ARGUMENTS = ["--workload=mlp", "--steps=20"]


def commands(settings: Settings, arguments: list[str]) -> dict[str, list[str]]:
    """Return the command of each arm."""
    found = {"by hand": torchrun(2, "by_hand.py", *arguments), "dstrat": script("with_dstrat.py", *arguments)}
    if settings.peer:
        found["lightning"] = script("with_lightning.py", *arguments, python=str(settings.peer))
    return found


def measure(settings: Settings) -> Iterator[Figure]:
    """Run the arms in turn."""
    samples: dict[str, list[float]] = {}
    for _ in range(2 if settings.quick else 7):
        for arm, command in commands(settings, ARGUMENTS).items():
            samples.setdefault(arm, []).append(run_job(command).seconds)
    yield Figure(
        name="wall time of a short job on 2 ranks, over torchrun and by hand",
        value=ratio_of(samples, "dstrat", over="by hand"),
        goal=1.0,
        peer=ratio_of(samples, "lightning", over="by hand") if settings.peer else None,
        medians=medians_of(samples),
        samples=samples,
    )
