"""Time of ``dstrat strategies``, and how it grows with the number of installed plugins."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

NUMBERS = (0, 10, 100, 1000)
LISTING_WITHOUT_TORCH = """
import sys
from dstrat.cli.main import main
sys.argv = ["dstrat", "strategies"]
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
PLUGIN = """
from dstrat import Component, hookimpl


@hookimpl
def dstrat_components():
    return [Component(kind="strategy", alias="made_up_{i}", target="made_up_{i}.strategy:Strategy", summary="made up")]
"""


def measure(settings: Settings) -> Iterator[Figure]:
    """List with 0, 10, 100 and 1000 plugins that were made up, in turn."""
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in NUMBERS:
            install(Path(folder, str(number)), number)
            _seconds(Path(folder, str(number)))  # compiles the modules, as pip does
        for _ in range(3 if settings.quick else 9):
            for number in NUMBERS:
                samples.setdefault(f"{number} plugins", []).append(_seconds(Path(folder, str(number))))
    medians = medians_of(samples)
    for number, goal in ((10, None), (100, 300), (1000, None)):
        yield Figure(
            name=f"dstrat strategies with {number} more plugins",
            value=1000 * medians[f"{number} plugins"],
            unit="ms",
            goal=goal,
            medians=medians,
            samples=samples,
            note="the whole command; torch is not loaded",
        )


def install(folder: Path, number: int) -> None:
    """Write so many distributions into a folder, as pip leaves them there."""
    folder.mkdir()
    for i in range(number):
        package, info = folder / f"made_up_{i}", folder / f"made_up_{i}-1.0.dist-info"
        package.mkdir()
        info.mkdir()
        (package / "__init__.py").touch()
        (package / "plugin.py").write_text(PLUGIN.replace("{i}", str(i)))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: made-up-{i}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dstrat.v1]\nmade_up_{i} = made_up_{i}.plugin\n")


def _seconds(folder: Path) -> float:
    start = time.perf_counter()
    listed = subprocess.run(
        [sys.executable, "-c", LISTING_WITHOUT_TORCH],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )
    seconds = time.perf_counter() - start
    if listed.stdout.count("made_up_") < int(folder.name):
        raise RuntimeError(f"the list lacks plugins:\n{listed.stdout}")
    return seconds
