"""Measure dstrat against hand-written torch loops, and against Lightning where it is installed.

For example::

    python benchmarks/run.py --quick
    python benchmarks/run.py --only imports --only steps
    python benchmarks/run.py --peer /path/to/an/environment/bin/python

The figures are printed next to their goals and written to ``benchmarks/results`` with all samples.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import importlib
import importlib.util
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from settings import Settings

if TYPE_CHECKING:
    from figure import Figure

MODULES = (
    "imports",
    "listing",
    "losses",
    "wall_time",
    "memory",
    "steps",
    "loop",
    "failing",
    "checkpoint",
    "fsdp",
    "zero",
)
WHEN_ASKED = (
    "bagua",
    "horovod_steps",
    "in_memory",
    "layouts",
    "loop_instructions",
    "mesh",
    "scaling",
    "xla_steps",
)
"""In turn they need root, for namespaces of the network; Horovod; ten minutes; ten minutes; ten minutes, and valgrind;
ten minutes; memory for 64 processes; torch_xla."""

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure what was asked for, print it and write it."""
    options = read_options()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages are compiled
    settings = Settings(quick=options.quick, peer=options.peer)
    console = Console()
    figures: list[Figure] = []
    for module in options.only or MODULES:
        console.print(f"measuring {module} ...")
        for figure in importlib.import_module(module).measure(settings):
            figures.append(figure)
            console.print(f"  {sentence(figure)}", highlight=False, soft_wrap=True)
    console.print(table_of(figures))
    console.print(f"written to {write(figures, settings)}", soft_wrap=True)


def read_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description="Measure dstrat against hand-written torch loops and Lightning.")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--only", action="append", choices=MODULES + WHEN_ASKED, help="this alone; may be repeated")
    parser.add_argument(
        "--peer",
        type=Path,
        default=sys.executable if importlib.util.find_spec("lightning") else None,
        help="Python of an environment that has dstrat, dstrat-ddp and lightning (default: this one, if it has)",
    )
    return parser.parse_args()


def sentence(figure: Figure) -> str:
    """Return a figure with the medians of its arms, and its note, in one line."""
    arms = ", ".join(f"{arm} {quantity(value, figure.arm_unit)}" for arm, value in figure.medians.items())
    note = f"; {figure.note}" if figure.note else ""
    return f"{figure.name}: {quantity(figure.value, figure.unit)} ({arms}){note}"


def table_of(figures: list[Figure]) -> Table:
    """Return the figures next to their goals."""
    table = Table("figure", "measured", "goal", "met", "Lightning")
    for figure in figures:
        bound = "at most" if figure.better == "smaller" else "at least"
        table.add_row(
            figure.name,
            quantity(figure.value, figure.unit),
            "" if figure.goal is None else f"{bound} {quantity(figure.goal, figure.unit)}",
            {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[figure.is_met],
            "" if figure.peer is None else quantity(figure.peer, figure.unit),
        )
    return table


def quantity(value: float, unit: str) -> str:
    """Return a number with its unit, for people."""
    if unit == "relative":
        return f"{value:.1e}"
    digits = 0 if value >= 100 else 1 if value >= 10 else 3 if unit == "x" else 2
    return f"{value:.{digits}f} {unit}"


def write(figures: list[Figure], settings: Settings) -> Path:
    """Write the figures with everything that one needs to compare them later; return the file."""
    now = dt.datetime.now(dt.timezone.utc)
    content = {
        "at": now.isoformat(timespec="seconds"),
        "quick": settings.quick,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "versions": {name: version(name) for name in ("dstrat", "dstrat-ddp", "torch")},
        "figures": [dataclasses.asdict(figure) | {"is_met": figure.is_met} for figure in figures],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


if __name__ == "__main__":
    main()
