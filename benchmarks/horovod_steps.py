"""Steps per second of Horovod on two ranks, over a hand-written Horovod loop in the same processes.

It needs the environment of ``nox -s third_party``: ``.nox/third-party/bin/python benchmarks/run.py --only
horovod_steps``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import HERE, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

Samples = dict[str, list[float]]

LENGTHS = {"mlp": 24, "tiny": 300}
"""For each workload the steps of one sample: about a second, so that the arms are close to each other in time."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure both workloads."""
    for workload, steps in LENGTHS.items():
        samples = _run(workload, steps, repeats=5 if settings.quick else 25)
        speeds, computing = samples["steps/s"], samples["cpu"]
        yield Figure(
            name=f"Horovod on 2 ranks, steps/s over by hand ({workload})",
            value=ratio_of(speeds, "dstrat", over="by hand"),
            goal=0.97,
            better="larger",
            medians=medians_of(speeds),
            arm_unit="steps/s",
            samples=speeds,
            note=f"a second arm by hand has {ratio_of(speeds, 'by hand again', over='by hand'):.3f}; processor time of "
            f"rank 0 {ratio_of(computing, 'dstrat', over='by hand'):.3f}",
        )


def _run(workload: str, steps: int, *, repeats: int) -> dict[str, Samples]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "samples.json")
        arguments = [f"--workload={workload}", f"--steps={steps}", f"--repeats={repeats}", f"--out={out}"]
        horovodrun = [Path(sys.executable).with_name("horovodrun"), "-np", "2"]
        run_job([*horovodrun, sys.executable, HERE / "horovod_steps_rank.py", *arguments], patience=900)
        samples: dict[str, Samples] = json.loads(out.read_text())
    return samples
