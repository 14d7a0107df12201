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


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure ``import dstrat``, and a Trainer that is made."""
    programs = {
        "empty": (sys.executable, "pass"),
        "dstrat": (sys.executable, f"import dstrat; {NO_TORCH}"),
        "torch": (sys.executable, "import torch"),
        "Trainer": (sys.executable, f"from dstrat import Trainer; {USE}"),
    }
    if settings.peer:
        programs["lightning"] = (str(settings.peer), f"from lightning import Trainer; {USE}")
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arm, (python, program) in programs.items():
            Path(folder, f"with_{arm}.py").write_text(program)
            _seconds(python, Path(folder, f"with_{arm}.py"))  # compiles the modules, as pip does
        for _ in range(3 if settings.quick else 11):
            for arm, (python, _) in programs.items():
                samples.setdefault(arm, []).append(_seconds(python, Path(folder, f"with_{arm}.py")))
    medians = medians_of(samples)
    yield Figure(
        name="import dstrat, over an empty interpreter",
        value=1000 * (medians["dstrat"] - medians["empty"]),
        unit="ms",
        goal=30,
        medians={arm: medians[arm] for arm in ("empty", "dstrat")},
        samples={arm: samples[arm] for arm in ("empty", "dstrat")},
        note="torch is not loaded",
    )
    yield Figure(
        name="from dstrat import Trainer, and a Trainer made, over import torch",
        value=ratio_of(samples, "Trainer", over="torch"),
        goal=1.10,
        peer=ratio_of(samples, "lightning", over="torch") if settings.peer else None,
        medians={arm: value for arm, value in medians.items() if arm not in ("empty", "dstrat")},
        samples={arm: values for arm, values in samples.items() if arm not in ("empty", "dstrat")},
    )


def _seconds(python: str, program: Path) -> float:
    start = time.perf_counter()
    subprocess.run([python, program], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start
