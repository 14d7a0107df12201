"""Charts and pages of runs: braille curves for terminals, image files, SVG in HTML."""

from __future__ import annotations

import io
import math
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from dstrat.errors import RequestError
from dstrat.training.loggers.logger import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from dstrat.cli.runs.record import Point

# Colours that differ for most colour-blind people, on white and on black (after Okabe and Ito).
COLORS = ("#2f8fd6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56d0e9", "#999999", "#b8860b")
_INK = "#010203"  # stands for the colour of the page's text, which depends on its theme
_FORMATS = (".html", ".pdf", ".png", ".svg")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column


class Curve(NamedTuple):
    """A line of a chart."""

    label: str
    points: Sequence[Point]


# In a terminal


def draw_in_terminal(curves: Sequence[Curve], width: int, height: int, *, has_colors: bool) -> Iterator[Text]:
    """Yield the lines of a chart with a legend below; without colours each curve is drawn with its letter.

    Args:
        curves: The curves.
        width: Number of columns.
        height: Number of lines above the axis.
        has_colors: Whether the terminal shows enough colours to tell curves apart; they are letters otherwise.
    """
    points = [point for curve in curves for point in curve.points if math.isfinite(point.value)]
    lowest, highest = _range([point.value for point in points])
    first, last = _range([point.step for point in points])
    ticks = {
        round(share * (height - 1)): f"{highest - share * (highest - lowest):.4g}" for share in (0, 0.25, 0.5, 0.75, 1)
    }
    margin = max(map(len, ticks.values()))
    columns = max(10, width - margin - 2)
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # dots and curve, by row and column
    for number, curve in enumerate(curves):
        for x, y in _line(
            [
                (
                    (point.step - first) / (last - first) * (2 * columns - 1),
                    (highest - point.value) / (highest - lowest) * (4 * height - 1),
                )
                for point in curve.points
                if math.isfinite(point.value)
            ]
        ):
            cell = y // 4, x // 2
            dots, owner = cells.get(cell, (0, number))
            cells[cell] = (dots if owner == number else 0) | _DOTS[y % 4][x % 2], number
    letters = not has_colors and len(curves) > 1
    for row in range(height):
        line = Text(f"{ticks.get(row, ''):>{margin}} ")
        line.append("┤" if row in ticks else "│", "dim")
        for column in range(columns):
            dots, number = cells.get((row, column), (0, 0))
            mark = " " if not dots else _letter(number) if letters else chr(0x2800 + dots)
            line.append(mark, COLORS[number % len(COLORS)] if dots else "")
        line.rstrip()
        yield line
    yield Text(f"{'':{margin}} └{'─' * columns}", "dim")
    end = f"step {last:.0f}"
    yield Text(f"{'':{margin}}  {first:<{max(1, columns - len(end))}.0f}{end}")
    for number, curve in enumerate(curves):
        values = f"last {curve.points[-1].value:.4g}, {len(curve.points)} values"
        mark = _letter(number) if letters else "━━"
        yield Text.assemble((mark, COLORS[number % len(COLORS)]), f" {curve.label}: {values}")


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, apart from each other."""
    lowest, highest = min(values), max(values)
    return (lowest, highest) if highest > lowest else (lowest - 0.5, lowest + 0.5)


def _letter(number: int) -> str:
    return chr(ord("a") + number % 26)


def _line(corners: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line through some points."""
    for (x, y), (next_x, next_y) in zip(corners, corners[1:] or corners, strict=False):
        count = max(1, round(max(abs(next_x - x), abs(next_y - y))))
        for number in range(count + 1):
            share = number / count
            yield round(x + share * (next_x - x)), round(y + share * (next_y - y))


# With matplotlib


def check_picture(path: Path, option: str) -> None:
    """Check that a picture can be written, before what it shows is computed.

    Raises:
        RequestError: The file has no suffix of a picture, or its folder does not exist.
        MissingRequirementError: matplotlib is not installed.
    """
    if path.suffix not in _FORMATS:
        raise RequestError(f"{option} {str(path)!r} must end in one of {', '.join(_FORMATS)}")
    if not path.parent.is_dir():
        raise RequestError(f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}")
    require("matplotlib", "a chart", extra="report")


@contextmanager
def chart_style(ink: str = "black") -> Iterator[None]:
    """Let figures that are made within have the style of all charts, with text and axes in a colour.

    Raises:
        MissingRequirementError: matplotlib is not installed.
    """
    require("matplotlib", "a chart", extra="report")
    import matplotlib as mpl

    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    colors: dict[Any, Any] = dict.fromkeys(names, ink)
    with mpl.rc_context({**colors, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        yield


def make_figure(title: str, curves: Sequence[Curve], *, ink: str = "black", unit: str = "") -> Figure:
    """Return a chart of curves over the optimizer step.

    Args:
        title: The title.
        curves: The curves.
        ink: Colour of text and axes.
        unit: Label of the values.

    Raises:
        MissingRequirementError: matplotlib is not installed.
    """
    with chart_style(ink):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for number, curve in enumerate(curves):
            color = COLORS[number % len(COLORS)]
            # A mark for each value where there are few: a line through one point would not be seen.
            mark = "o" if len(curve.points) <= 25 else ""
            axes.plot(*zip(*curve.points, strict=True), label=curve.label, color=color, marker=mark, markersize=3)
        axes.set(title=title, xlabel="optimizer step", ylabel=unit)
        axes.grid(alpha=0.25)
        if unit:  # of a rate: a change looks as large as it is
            axes.set_ylim(bottom=0)
        if len(curves) > 1:
            figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def make_svg(title: str, curves: Sequence[Curve], *, unit: str = "") -> str:
    """Return a chart of curves as the SVG element of a page, with the colour of the page's text."""
    return svg_of(lambda ink: make_figure(title, curves, ink=ink, unit=unit))


def svg_of(make: Callable[[str], Figure]) -> str:
    """Return a chart as the SVG element of a page, with the colour of the page's text.

    Args:
        make: Returns the chart with text and axes in a colour.
    """
    figure, file = make(_INK), io.StringIO()  # before the import, so that a missing matplotlib is explained
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text, which can be found and copied
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    _, start, rest = file.getvalue().partition("<svg ")  # without the XML header
    return f"{start}{rest}".replace(_INK, "currentColor")


def save_figure(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write a chart as a file of the format that its suffix says."""
    make_figure(title, curves).savefig(path, dpi=150)


# Pages


def render(template: str, **values: Any) -> str:
    """Return an HTML page that needs no other file and no network.

    Args:
        template: Name of a file in the folder ``templates``.
        **values: Values for it; texts are escaped.

    Raises:
        MissingRequirementError: jinja2 is not installed.
    """
    require("jinja2", "an HTML page", extra="report")
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"colors": COLORS, "version": version("dstrat")}
    return environment.get_template(template).render(**values)
