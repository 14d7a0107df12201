"""Losses of every layout, schedule and model against one device, as a table; what is refused is there with its reason.

For example::

    python benchmarks/layouts.py
    python benchmarks/layouts.py --model Llama --layout "pp x dp"
    python benchmarks/layouts.py --cells cells.jsonl  # again after an interruption: cells in the file are not measured

Each training has 20 steps in float32, with SGD, momentum, clipping, and samples with different numbers of labels.  The
table shows the largest relative difference of a loss.  Its first row is that of one device which has the samples of
each batch in other orders: rounding alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure
from layouts_rank import MODELS, TRANSFORMERS, Training, losses_of
from rich.console import Console
from rich.table import Table

from dstrat.testing.ranks.jobs import end_teams, run_in_team
from dstrat.testing.ranks.team import begin_loading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from settings import Settings

GOAL = 1e-6
MICROBATCHES = 4
_PATIENCE = 600.0  # seconds for a training: 120 were too few for 8 ranks beside many programs
ROUNDING, ORDERS = "one device, other orders", (1, 2, 3)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {  # number of ranks, and sizes of axes; dp_shard is the rest
    "dp_shard": (2, {}),
    "dp_replicate": (2, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "cp": (2, {"cp": 2}),
    "ep": (2, {"ep": 2}),
    "pp x dp": (4, {"pp": 2}),
    "pp x tp": (4, {"pp": 2, "tp": 2}),
    "pp x cp": (4, {"pp": 2, "cp": 2}),
    "pp x ep": (4, {"pp": 2, "ep": 2}),
    "dp x tp": (4, {"tp": 2}),
    "dp x cp": (4, {"cp": 2}),
    "dp_replicate x dp_shard": (4, {"dp_replicate": 2}),
    "pp x dp x tp": (8, {"pp": 2, "tp": 2}),
}
SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A layout with a schedule.

    Attributes:
        layout: Its name in :data:`LAYOUTS`.
        schedule: The schedule; empty without stages.
    """

    layout: str
    schedule: str = ""

    def __str__(self) -> str:
        return f"{self.layout}, {self.schedule}" if self.schedule else self.layout

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return LAYOUTS[self.layout][0]

    @property
    def options(self) -> dict[str, Any]:
        """Constructor arguments of the strategy."""
        sizes = LAYOUTS[self.layout][1]
        return {**sizes, "schedule": self.schedule, "microbatches": MICROBATCHES} if self.schedule else {**sizes}


def rows(layouts: Sequence[str] = tuple(LAYOUTS), schedules: Sequence[str] = SCHEDULES) -> list[Row]:
    """Return the rows of the table, those with as many ranks next to each other."""
    listed = [
        Row(layout=layout, schedule=schedule)
        for layout in layouts
        for schedule in (schedules if "pp" in LAYOUTS[layout][1] else ("",))
    ]
    return sorted(listed, key=lambda row: row.ranks)


def compare(
    model: str, listed: Sequence[Row], precision: str = "32-true", known: Mapping[str, float | str] | None = None
) -> Iterator[tuple[str, float | str]]:
    """Yield the largest relative difference of each row, or the sentence with which it is refused.

    Args:
        model: One of :data:`MODELS`.
        listed: The rows, beside that of one device.
        precision: Flag of the precision.
        known: Rows that are measured already.
    """
    known = known or {}
    if all(row in known for row in (ROUNDING, *map(str, listed))):
        yield from ((row, known[row]) for row in (ROUNDING, *map(str, listed)))
        return

    def losses(ranks: int, **options: Any) -> Any:
        training = Training(model=model, precision=precision, **options)
        return run_in_team(losses_of, ranks, seconds=_PATIENCE, training=training)[0]

    expected = losses(1)
    rounding = known.get(ROUNDING)
    if rounding is None:
        rounding = max(_difference(losses(1, order=order), expected) for order in ORDERS)
    yield ROUNDING, rounding
    for row in listed:
        value = known.get(str(row))
        if value is None:
            found = losses(row.ranks, options=row.options)
            value = found if isinstance(found, str) else _difference(found, expected)
        yield str(row), value


def _difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def measure(settings: Settings) -> Iterator[Figure]:
    """Compare all models, or with ``--quick`` those without transformers, and one schedule."""
    models = _possible_models()
    if settings.quick:
        models = [model for model in models if model not in TRANSFORMERS]
    listed = rows(schedules=SCHEDULES[:1] if settings.quick else SCHEDULES)
    for model in models:
        found = dict(compare(model, listed))
        differences = {row: value for row, value in found.items() if not isinstance(value, str)}
        refused = [row for row in found if row not in differences]
        rounding = differences.pop(ROUNDING)
        yield Figure(
            name=f"losses of {model} against one device, {len(differences)} layouts and schedules",
            value=max(differences.values()),
            unit="relative",
            goal=GOAL,
            medians=differences,
            arm_unit="relative",
            note=f"rounding alone is {rounding:.0e}" + (f"; refused: {'; '.join(refused)}" if refused else ""),
        )
    end_teams()


def table_of(found: Mapping[str, Mapping[str, float | str]]) -> tuple[Table, list[str]]:
    """Return the table of all models, and the sentences of what is refused."""
    sentences: list[str] = []
    table = Table("layout", *found, title=f"Largest relative difference from one device, goal {GOAL:.0e}")
    for row in next(iter(found.values())):
        cells = []
        for values in found.values():
            value = values[row]
            if isinstance(value, str):
                if value not in sentences:
                    sentences.append(value)
                cells.append(f"refused ({sentences.index(value) + 1})")
            else:
                cells.append(f"[red]{value:.1e}[/]" if value > GOAL and row != ROUNDING else f"{value:.1e}")
        table.add_row(row, *cells)
    return table, sentences


def _possible_models() -> list[str]:
    """Load what ranks need; return the models whose libraries are here."""
    if importlib.util.find_spec("transformers") is None:
        begin_loading("dstrat_mesh.strategy")
        return [model for model in MODELS if model not in TRANSFORMERS]
    begin_loading("dstrat_mesh.strategy", "dstrat_transformers.module", "transformers")
    return list(MODELS)


class _Cells:
    """The measured cells of a table, one in each line of a file, so that an interrupted run can be continued.

    Args:
        path: The file; None for none.
        precision: Flag of the precision; cells of others are left alone.
    """

    def __init__(self, path: Path | None, precision: str) -> None:
        self._path, self._precision = path, precision
        lines: list[str] = []
        if path is not None and path.exists():
            text = path.read_text()
            whole, _, cut = text.rpartition("\n")
            lines = whole.splitlines()
            if cut:  # by an interruption; the next cell begins a line
                path.write_text(text.removesuffix(cut))
        self._values: dict[tuple[str, str], float | str] = {
            (cell["model"], cell["row"]): cell["value"]
            for cell in map(json.loads, lines)
            if cell["precision"] == precision
        }

    def of(self, model: str) -> dict[str, float | str]:
        """Return the values of a model's rows."""
        return {row: value for (name, row), value in self._values.items() if name == model}

    def add(self, model: str, row: str, value: float | str) -> None:
        """Write a new cell."""
        if self._path is None or (model, row) in self._values:
            return
        self._values[model, row] = value
        cell = {"model": model, "row": row, "value": value, "precision": self._precision}
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this model")
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS), help="only this layout")
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="only this schedule")
    parser.add_argument("--precision", default="32-true", choices=("32-true", "64-true"), help="flag of the precision")
    parser.add_argument("--cells", type=Path, help="file of cells: those in it are not measured, new ones are added")
    options = parser.parse_args()
    began, found, models = time.perf_counter(), {}, _possible_models()
    cells = _Cells(options.cells, options.precision)
    for model in options.model or models:
        found[model] = {}
        listed = rows(options.layout or tuple(LAYOUTS), options.schedule or SCHEDULES)
        for row, value in compare(model, listed, options.precision, cells.of(model)):
            found[model][row] = value
            cells.add(model, row, value)
            print(f"{model}, {row}: {value if isinstance(value, str) else f'{value:.1e}'}", file=sys.stderr)
    end_teams()
    console = Console(width=160)
    table, sentences = table_of(found)
    console.print(table)
    for number, sentence in enumerate(sentences, 1):
        console.print(f"({number}) {sentence}", highlight=False)
    console.print(f"{time.perf_counter() - began:.0f} s", highlight=False)


if __name__ == "__main__":
    main()
