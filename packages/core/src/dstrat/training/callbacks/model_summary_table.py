"""A summary of a module as a table of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dstrat.training.callbacks.model_summary_layers import Layer, Summary

LEFT = ("layer", "type", "input", "output")
"""Columns of words; numbers are aligned to the right."""


def header(summary: Summary) -> tuple[str, ...]:
    """Return the names of the columns; there are shapes only where one is known."""
    shapes = ("input", "output") if _has_shapes(summary) else ()
    return ("layer", "type", "parameters", "trainable", "size", *shapes)


def cells(layer: Layer, summary: Summary) -> tuple[str, ...]:
    """Return a layer's row."""
    row = (layer.name, layer.kind, f"{layer.parameters:,}", f"{layer.trainable:,}", format_bytes(layer.num_bytes))
    if not _has_shapes(summary):
        return row
    return (*row, "", "") if layer.shapes is None else (*row, layer.shapes.input, layer.shapes.output)


def as_text(summary: Summary) -> str:
    """Return the whole as lines."""
    names = header(summary)
    rows = [names, *(cells(layer, summary) for layer in summary.layers), cells(summary.total, summary)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    lines = [
        "  ".join(
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for cell, width, name in zip(row, widths, names, strict=True)
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    layers = [*lines[1:-1], rule] if summary.layers else []
    return "\n".join(line.rstrip() for line in [lines[0], rule, *layers, lines[-1], *summary.remarks])


def format_bytes(size: float) -> str:
    """Return a number of bytes with a unit of powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def _has_shapes(summary: Summary) -> bool:
    return any(layer.shapes is not None for layer in (*summary.layers, summary.total))
