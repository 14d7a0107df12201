"""Peak memory of a job on two ranks with all of its processes, over torchrun and a hand-written loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import run_job
from wall_time import commands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

MEGABYTE = 1024 * 1024


def measure(settings: Settings) -> Iterator[Figure]:
    """Run the arms in turn and watch their memory."""
    samples: dict[str, list[float]] = {}
    for _ in range(1 if settings.quick else 3):
        for arm, command in commands(settings, ["--workload=mlp", "--steps=60"]).items():
            peak = run_job(command, watch_memory=True).peak_memory
            samples.setdefault(arm, []).append(peak / MEGABYTE)
    yield Figure(
        name="peak memory of a job on 2 ranks, over torchrun and by hand",
        value=ratio_of(samples, "dstrat", over="by hand"),
        peer=ratio_of(samples, "lightning", over="by hand") if settings.peer else None,
        medians=medians_of(samples),
        arm_unit="MiB",
        samples=samples,
        note="resident memory of the ranks and of the process that started them, pages that they share counted in each",
    )
