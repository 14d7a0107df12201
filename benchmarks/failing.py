"""A rank fails: how long it takes until the whole job has ended and nothing of it is left."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from faults import FAULTS
from figure import Figure
from job import run_job
from wall_time import commands

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

PATIENCE = 75.0
"""Seconds after which what is left of a job is killed; the busy rank of a fault would work for 60."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Let each fault happen, in each arm."""
    for fault, (_, description) in FAULTS.items():
        samples: dict[str, list[float]] = {}
        left: set[str] = set()
        for _ in range(1 if settings.quick else 3):
            for arm in ("by hand", "dstrat", *(["lightning"] if settings.peer else [])):
                seconds, leftovers = _until_over(arm, fault, settings)
                samples.setdefault(arm, []).append(seconds)
                left |= {arm} if leftovers else set()
        medians = {arm: statistics.median(values) for arm, values in samples.items()}
        notes = [f"{arm} left processes that had to be killed" for arm in sorted(left)]
        yield Figure(
            name=f"until the job is over: {description}",
            value=max(samples["dstrat"]) if "dstrat" not in left else float("inf"),
            unit="s",
            goal=15 if fault == "stubborn" else 5,
            peer=medians.get("lightning"),
            medians=medians,
            samples=samples,
            note="; ".join(["the slowest run", *notes]),
        )


def _until_over(arm: str, fault: str, settings: Settings) -> tuple[float, bool]:
    """Return the seconds from the fault to the end, and whether something was left."""
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")
        command = commands(settings, ["--workload=tiny", f"--fault={fault}", f"--fault-time={moment}"])[arm]
        job = run_job(command, patience=PATIENCE, must_work=False)
        if not moment.exists():
            raise RuntimeError(f"{arm} ended before its fault:\n{job.output[-4000:]}")
        return job.ended_at - float(moment.read_text()), job.leftovers
