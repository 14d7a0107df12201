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

Samples = dict[str, list[float]]

LENGTHS = {"mlp": 24, "tiny": 400}
"""For each workload the steps of one sample: about a second, so that the arms are close to each other in time."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure both workloads."""
    for workload, steps in LENGTHS.items():
        speeds, computing = _run(workload, steps, repeats=5 if settings.quick else 25, settings=settings)
        yield Figure(
            name=f"DDP on 2 ranks, steps/s over by hand ({workload})",
            value=ratio_of(speeds, "dstrat", over="by hand"),
            goal=0.98,
            better="larger",
            peer=ratio_of(speeds, "lightning", over="by hand") if "lightning" in speeds else None,
            medians=medians_of(speeds),
            arm_unit="steps/s",
            samples=speeds,
            note=f"a second arm by hand has {ratio_of(speeds, 'by hand again', over='by hand'):.3f}",
        )
        yield Figure(
            name=f"DDP on 2 ranks, computing per step over by hand ({workload})",
            value=ratio_of(computing, "dstrat", over="by hand"),
            peer=ratio_of(computing, "lightning", over="by hand") if "lightning" in computing else None,
            medians=medians_of(computing),
            arm_unit="ms",
            samples=computing,
            note="processor time of rank 0, which other programs on the machine disturb less than the steps per second",
        )


def _run(workload: str, steps: int, *, repeats: int, settings: Settings) -> tuple[Samples, Samples]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "samples.json")
        arguments = [f"--workload={workload}", f"--steps={steps}", f"--repeats={repeats}", f"--out={out}"]
        python = str(settings.peer or sys.executable)
        run_job(torchrun(2, "steps_rank.py", *arguments, python=python), patience=900)
        samples: dict[str, Samples] = json.loads(out.read_text())
    return samples["steps/s"], samples["cpu"]
