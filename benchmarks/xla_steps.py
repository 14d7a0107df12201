"""Steps per second on XLA's CPU backend over a hand-written torch_xla loop: one device, and SPMD on four virtual ones.

It needs the environment of ``nox -s xla``: ``.nox/xla/bin/python benchmarks/run.py --only xla_steps``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import run_job, script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

Samples = dict[str, list[float]]

STEPS = 60
"""Of one sample: one to two seconds, so that the arms are close to each other in time."""

WAYS = {1: "XLA on one device", 4: "XLA's SPMD on 4 virtual devices"}


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure both, each in a process of its own: SPMD is a mode of a whole process."""
    for devices, name in WAYS.items():
        samples = _run(devices, repeats=5 if settings.quick else 25)
        speeds, computing = samples["steps/s"], samples["cpu"]
        yield Figure(
            name=f"{name}, steps/s over by hand",
            value=ratio_of(speeds, "dstrat", over="by hand"),
            goal=0.97,
            better="larger",
            medians=medians_of(speeds),
            arm_unit="steps/s",
            samples=speeds,
            note=f"a second arm by hand has {ratio_of(speeds, 'by hand again', over='by hand'):.3f}; processor time "
            f"of the process {ratio_of(computing, 'dstrat', over='by hand'):.3f}",
        )
        recording = samples["recording"]
        yield Figure(
            name=f"{name}, computing of the main thread per step over by hand",
            value=ratio_of(recording, "dstrat", over="by hand"),
            medians=medians_of(recording),
            arm_unit="ms",
            samples=recording,
            note="what Python and torch_xla need to record a step and look up its graph",
        )


def _run(devices: int, *, repeats: int) -> dict[str, Samples]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "samples.json")
        arguments = [f"--devices={devices}", f"--steps={STEPS}", f"--repeats={repeats}", f"--out={out}"]
        environ = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
        run_job(script("xla_steps_rank.py", *arguments), environ=environ, patience=900)
        samples: dict[str, Samples] = json.loads(out.read_text())
    return samples
