"""Tables of logged values and of the results of an evaluation: on a terminal, in a notebook, in a file."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from dstrat.training.callbacks.progress import format_value
from dstrat.training.metrics.values import DATALOADER_SUFFIX
from dstrat.training.notebook import Output, cell_number, has_notebook, html_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_DIGITS = 6
_BETWEEN = "  "

Rows = list[list[str]]


class MetricValues(dict[str, Any]):
    """Logged values by name; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        rows = [(name, format_value(float(value), digits=_DIGITS)) for name, value in self.items()]
        return html_table(("name", "value"), rows, text_columns=("name",))


class EvaluationResults(list[dict[str, float]]):
    """The values of a validation or test, a dict for each loader; a notebook shows them as a table.

    Args:
        stage: ``"validate"`` or ``"test"``.
        values: The values by name, for each loader.
    """

    def __init__(self, stage: str = "", values: Iterable[Mapping[str, float]] = ()) -> None:
        super().__init__(map(MetricValues, values))
        self._stage = stage
        self._cell: int | None = None  # the one whose output shows the table

    def show(self) -> None:
        """Show the table below the cell of a notebook, or on stderr: with bold headers on a terminal, else as text."""
        rows = rows_of(self._stage, self)
        if len(rows) == 1 or sys.stderr is None:  # None in a program without a console (pythonw)
            return
        if has_notebook():
            Output().show(self._repr_html_(), "\n".join(_lines(rows)))
            self._cell = cell_number()
        elif sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
            _show_on_terminal(rows)
        else:
            print("\n".join(_lines(rows)), file=sys.stderr, flush=True)

    def _repr_html_(self) -> str:
        head, *rows = rows_of(self._stage, self)
        return html_table(head, rows, text_columns=(self._stage,))

    def _ipython_display_(self) -> None:
        if not has_notebook():
            raise NotImplementedError  # in IPython's protocol: a prompt shows the list in its own way
        if self._cell != cell_number():  # a cell that ends with trainer.test(...) has the table already
            self.show()


def rows_of(stage: str, results: Iterable[Mapping[str, float]]) -> Rows:
    """Return a row of headers, and a row for each name with its value for each loader."""
    plain = [{name.partition(DATALOADER_SUFFIX)[0]: value for name, value in values.items()} for values in results]
    heads = [f"loader {index}" for index in range(len(plain))] if len(plain) > 1 else ["value"]
    names = dict.fromkeys(name for values in plain for name in values)
    return [
        [stage, *heads],
        *(
            [name, *(format_value(values[name], digits=_DIGITS) if name in values else "" for values in plain)]
            for name in names
        ),
    ]


def _lines(rows: Rows) -> list[str]:
    widths = _widths(rows)
    lines = [
        _BETWEEN.join([name.ljust(widths[0]), *(map(str.rjust, values, widths[1:]))]).rstrip() for name, *values in rows
    ]
    return [lines[0], "-" * (sum(widths) + len(_BETWEEN) * (len(widths) - 1)), *lines[1:]]


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _show_on_terminal(rows: Rows) -> None:
    """Print the table, split into several tables if the terminal is too narrow for all loaders."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, (of_names, *of_values) = Console(stderr=True), _widths(rows)
    width = console.width - min(of_names, console.width // 2)
    at_once = max(1, width // (max(of_values) + len(_BETWEEN)))
    for first in range(1, len(rows[0]), at_once):
        columns = range(first, min(first + at_once, len(rows[0])))
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
        table.add_column(Text(rows[0][0]), overflow="fold")
        for column in columns:
            table.add_column(Text(rows[0][column]), justify="right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(Text(row[0]), *(Text(row[column]) for column in columns))
        console.print(table)
