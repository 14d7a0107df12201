"""Steps per second of DDP on two ranks, over hand-written DDP in the same processes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

LENGTHS = {"mlp": (60, 6), "tiny": (1500, 3)}
"""For each workload the steps that are timed, normally and in a quick run."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure both workloads."""
    for workload, (steps, divisor) in LENGTHS.items():
        samples = _run(workload, steps // divisor if settings.quick else steps, settings)
        yield Figure(
            name=f"DDP on 2 ranks, steps/s over by hand ({workload})",
            value=ratio_of(samples, "dstrat", over="by hand"),
            goal=0.98,
            better="larger",
            peer=ratio_of(samples, "lightning", over="by hand") if "lightning" in samples else None,
            medians=medians_of(samples),
            arm_unit="steps/s",
            samples=samples,
        )


def _run(workload: str, steps: int, settings: Settings) -> dict[str, list[float]]:
    repeats = 3 if settings.quick else 9
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "samples.json")
        arguments = [f"--workload={workload}", f"--steps={steps}", f"--repeats={repeats}", f"--out={out}"]
        python = str(settings.peer or sys.executable)
        run_job(torchrun(2, "steps_rank.py", *arguments, python=python), patience=900)
        samples: dict[str, list[float]] = json.loads(out.read_text())
    return samples
