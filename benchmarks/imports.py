"""Time of imports, each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

NO_TORCH = "import sys; assert 'torch' not in sys.modules"
USE = "Trainer(strategy='ddp', accelerator='cpu', devices=2, logger=False)"
AT_ONCE = "import os; os._exit(0)"
"""Ends an interpreter without the half second that it takes to let go of torch."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure ``import dstrat``, and a Trainer that is made."""
    yield _light_import(_samples({"empty": "pass", "dstrat": f"import dstrat; {NO_TORCH}"}, settings))
    for ending, name in (
        (AT_ONCE, "from dstrat import Trainer, and a Trainer made, over import torch"),
        ("pass", "the same, with the end of the interpreter"),
    ):
        programs = {"torch": f"import torch; {ending}", "dstrat": f"from dstrat import Trainer; {USE}; {ending}"}
        if settings.peer:
            programs["lightning"] = f"from lightning import Trainer; {USE}; {ending}"
        samples = _samples(programs, settings)
        yield Figure(
            name=name,
            value=ratio_of(samples, "dstrat", over="torch"),
            goal=1.10,
            peer=ratio_of(samples, "lightning", over="torch") if settings.peer else None,
            medians=medians_of(samples),
            samples=samples,
        )


def _light_import(samples: dict[str, list[float]]) -> Figure:
    medians = medians_of(samples)
    return Figure(
        name="import dstrat, over an empty interpreter",
        value=1000 * (medians["dstrat"] - medians["empty"]),
        unit="ms",
        goal=30,
        medians=medians,
        samples=samples,
        note="torch is not loaded",
    )


def _samples(programs: dict[str, str], settings: Settings) -> dict[str, list[float]]:
    """Run the programs in turn, each as a script of its own."""
    samples: dict[str, list[float]] = {arm: [] for arm in programs}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(4 if settings.quick else 12):
            for arm, program in programs.items():
                path = Path(folder, f"with_{arm}.py")
                path.write_text(program)
                seconds = _seconds(str(settings.peer) if arm == "lightning" else sys.executable, path)
                if repeat:  # the first round compiles the modules, as pip does
                    samples[arm].append(seconds)
    return samples


def _seconds(python: str, program: Path) -> float:
    start = time.perf_counter()
    subprocess.run([python, program], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start
