"""``dstrat plot``: curves of a logged value over several runs."""

from __future__ import annotations

import math
from pathlib import Path

import click
from rich.console import Console

from dstrat.cli.runs.charts import Curve, check_picture, draw_in_terminal, make_svg, render, save_figure
from dstrat.cli.runs.command import NO_RUNS
from dstrat.cli.runs.record import check_metric, find_runs, select_runs
from dstrat.errors import RequestError

_MOST_RUNS = 6  # that are drawn where none are named
_LINES = 16


@click.command(short_help="Draw a logged value over several runs.")
@click.argument("metric")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--output", type=click.Path(path_type=Path), help="A file to write: .png, .svg, .pdf or .html.")
def plot(metric: str, runs: tuple[str, ...], output: Path | None) -> None:
    """Draw a logged value over the optimizer steps, in the terminal or to a file, with a curve for each run.

    A run is named by its log folder, by the end of that folder's path (version_3, or 3), or as "last".  Without a run
    the newest below the working directory are drawn.  Files need the extra dstrat[report]; an HTML page is one file,
    which needs no network.
    """
    if output is not None:
        check_picture(output, "--output")
    listed = select_runs(runs) if runs else find_runs([Path()])
    if not listed:
        raise RequestError(NO_RUNS)
    check_metric(metric, listed)
    drawable = [run for run in listed if any(math.isfinite(point.value) for point in run.curves.get(metric, ()))]
    if not drawable:
        raise RequestError(
            f"no curve of {metric!r} can be drawn: curves come from metrics.csv, which CSVLogger writes, the default "
            "logger; beside others pass Trainer(logger=[..., CSVLogger()])"
        )
    if len(drawable) > _MOST_RUNS and not runs:
        click.echo(f"the newest {_MOST_RUNS} of {len(drawable)} runs; name others to see them", err=True)
        drawable = drawable[-_MOST_RUNS:]
    for run in listed if runs else ():
        if run not in drawable:
            click.echo(f"{run.name} has no values of {metric!r}", err=True)
    curves = [Curve(run.name, run.curves[metric]) for run in drawable]
    if output is None:
        console = Console(highlight=False)
        has_colors = console.color_system in {"256", "truecolor"}  # of 16 colours, two of ours would be the same
        lines = draw_in_terminal(curves, console.width, _LINES, has_colors=has_colors)
        console.print(metric, style="bold")
        for line in lines:
            console.print(line, no_wrap=True, overflow="ellipsis")
        return
    if output.suffix == ".html":
        page = render("plot.html.jinja", title=metric, chart=make_svg(metric, curves), curves=curves)
        output.write_text(page, encoding="utf-8")
    else:
        save_figure(output, metric, curves)
    click.echo(f"wrote {output}")
