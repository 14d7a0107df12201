"""Table of the results of a validation or test."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dstrat.training.callbacks.progress import format_value
from dstrat.training.metrics.entry import DATALOADER_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DIGITS = 6
_BETWEEN = "  "

Rows = list[list[str]]


def show_results(stage: str, results: Sequence[Mapping[str, float]]) -> None:
    """Write the values of each loader to stderr: with bold heads on a terminal, as plain text elsewhere.

    Args:
        stage: What was run, validate or test.
        results: The values by name, of each loader.
    """
    rows = rows_of(stage, results)
    if len(rows) == 1 or sys.stderr is None:  # as in a program without a console
        return
    if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        _show_on_terminal(rows)
    else:
        print("\n".join(_lines(rows)), file=sys.stderr, flush=True)


def rows_of(stage: str, results: Sequence[Mapping[str, float]]) -> Rows:
    """Return a row of heads, and one for each name with its value for each loader."""
    plain = [{name.partition(DATALOADER_SUFFIX)[0]: value for name, value in values.items()} for values in results]
    heads = [f"loader {index}" for index in range(len(plain))] if len(plain) > 1 else ["value"]
    names = dict.fromkeys(name for values in plain for name in values)
    return [
        [stage, *heads],
        *([name, *(_format(values.get(name)) for values in plain)] for name in names),
    ]


def _format(value: float | None) -> str:
    return "" if value is None else format_value(value, digits=_DIGITS)


def _lines(rows: Rows) -> list[str]:
    widths = _widths(rows)
    lines = [
        _BETWEEN.join([name.ljust(widths[0]), *(map(str.rjust, values, widths[1:]))]).rstrip() for name, *values in rows
    ]
    return [lines[0], "-" * (sum(widths) + len(_BETWEEN) * (len(widths) - 1)), *lines[1:]]


def _widths(rows: Rows) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _show_on_terminal(rows: Rows) -> None:
    """Write the table, or several of them below one another where the terminal is too narrow for all loaders."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console, (of_names, *of_values) = Console(stderr=True), _widths(rows)
    left = console.width - min(of_names, console.width // 2)
    at_once = max(1, left // (max(of_values) + len(_BETWEEN)))
    for first in range(1, len(rows[0]), at_once):
        columns = range(first, min(first + at_once, len(rows[0])))
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold")
        table.add_column(Text(rows[0][0]), overflow="fold")
        for column in columns:
            table.add_column(Text(rows[0][column]), justify="right", no_wrap=True)
        for row in rows[1:]:
            table.add_row(Text(row[0]), *(Text(row[column]) for column in columns))
        console.print(table)
