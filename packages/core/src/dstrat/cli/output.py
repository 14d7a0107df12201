"""Output of commands: tables in terminals, plain lines in pipes, JSON for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_MOST_OF_A_LINE = 0.7  # largest fraction of a terminal's width for a first column without line breaks in names
_MOST_FOR_NUMBERS = 0.9  # of its width, for columns that are not wrapped

json_option: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(value: Any) -> None:
    """Print a value as JSON, with the ``repr`` of objects that JSON does not have."""
    click.echo(json.dumps(value, indent=2, default=repr))


def print_table(rows: Sequence[Sequence[str]], headers: Sequence[str] = (), *, unbroken: Collection[str] = ()) -> None:
    """Print rows in columns: in a terminal wrapped and with a bold header, elsewhere each row on one line.

    Args:
        rows: The cells of each row.
        headers: Names of the columns.
        unbroken: Names of columns that are not wrapped where the terminal is wide enough, such as numbers.
    """
    if sys.stdout.isatty():
        _print_in_terminal(rows, headers, unbroken)
    else:
        _print_plain([headers, *rows] if headers else rows)


def _print_plain(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _print_in_terminal(rows: Sequence[Sequence[str]], headers: Sequence[str], unbroken: Collection[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(headers), header_style="bold")
    widths = [max(map(len, column)) for column in zip(*([headers] if headers else []), *rows, strict=True)]
    is_unbroken = [name in unbroken for name in headers] or [False] * len(widths)
    fixed = sum(width + 2 for width, is_fixed in zip(widths, is_unbroken, strict=True) if is_fixed)
    if fixed > _MOST_FOR_NUMBERS * console.width:  # rich would cut these columns
        is_unbroken, fixed = [False] * len(widths), 0
    is_unbroken[0] = widths[0] < _MOST_OF_A_LINE * (console.width - fixed)
    for position, name in enumerate(headers or [""] * len(widths)):
        style = "cyan" if position == 0 else ""
        table.add_column(name, overflow="fold", style=style, no_wrap=is_unbroken[position])
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
