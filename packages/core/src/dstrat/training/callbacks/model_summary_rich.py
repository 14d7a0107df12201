"""A summary of a module as a table on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dstrat.training.callbacks.model_summary_table import LEFT, cells, header

if TYPE_CHECKING:
    from dstrat.training.callbacks.model_summary_layers import Summary


def show_on_terminal(summary: Summary) -> None:
    """Write a summary to stderr, which is a terminal."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        show_footer=True,
        pad_edge=False,
        collapse_padding=True,
        header_style="bold",
        footer_style="bold",
    )
    for name, total in zip(header(summary), cells(summary.total, summary), strict=True):
        is_number = name not in LEFT
        table.add_column(
            name, Text(total), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold"
        )
    for layer in summary.layers:
        frozen = layer.parameters > 0 and layer.trainable == 0
        table.add_row(*map(Text, cells(layer, summary)), style="dim" if frozen else "")
    console = Console(stderr=True)
    console.print(table)
    for remark in summary.remarks:
        console.print(Text(remark, style="dim"))
