"""``dstrat runs``: recorded runs, sorted by a logged value."""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.output import json_option, print_json, print_table
from dstrat.cli.runs.record import check_metric, default_metric, find_runs, is_higher_better

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.cli.runs.record import RecordedRun

NO_RUNS = "there are no runs here: a Trainer records each beside its logs, below dstrat_logs by default"


@click.command(short_help="List the runs below a folder, with how they ended.")
@click.argument("folders", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sort", "metric", help="Name of a logged value: the run with the best last value comes first.")
@click.option("--metric", "metrics", multiple=True, help="A logged value to show; several times for several.")
@click.option("--higher/--lower", "is_higher", default=None, help="Whether larger values are better, for --sort.")
@json_option
def runs(
    folders: tuple[Path, ...], metric: str | None, metrics: tuple[str, ...], is_higher: bool | None, as_json: bool
) -> None:
    """List the runs below the working directory or other folders, the newest last.

    Each fit that logs to a folder is a run, with later tests of the same Trainer.  A status is completed, failed,
    interrupted, running, killed where the process has gone without an end, or unknown on another machine.  Values are
    the last ones that were logged.  For --sort a ModelCheckpoint that monitors the value says which values are better;
    otherwise smaller ones are.
    """
    listed = find_runs(folders or [Path()])
    if metric is not None:
        check_metric(metric, listed)
        better = is_higher_better(metric, listed) if is_higher is None else is_higher
        listed.sort(key=lambda run: _rank(run.last_values.get(metric), is_higher=better))
    if as_json:
        print_json([_as_dict(run) for run in listed])
        return
    if not listed:
        click.echo(NO_RUNS)
        return
    shown = list(dict.fromkeys([*([metric] if metric else []), *metrics])) or _common_metric(listed)
    for name in metrics:
        check_metric(name, listed)
    headers = ["run", "status", "strategy", "steps", "time", "begin", *shown]
    rows = [_row(run, shown) for run in listed]
    if sys.stdout.isatty():
        headers, rows = _fitting(headers, rows, shutil.get_terminal_size().columns)
    print_table(rows, headers, unbroken=("status", "steps", "time", *shown))
    for run in listed:
        if run.status in ("failed", "interrupted") and (reason := run.stages[-1].reason):
            click.echo(f"{run.name} {run.status}: {reason}")


def _fitting(headers: list[str], rows: list[list[str]], width: int) -> tuple[list[str], list[list[str]]]:
    """Return a table without those of its less important columns for which a terminal is too narrow."""
    for name in ("begin", "strategy", "time", "steps"):
        if sum(max(map(len, column)) + 2 for column in zip(headers, *rows, strict=True)) - 2 <= width:
            break
        index = headers.index(name)
        headers, *rows = ([*row[:index], *row[index + 1 :]] for row in (headers, *rows))
    return headers, rows


def _common_metric(listed: Sequence[RecordedRun]) -> list[str]:
    names = [name for run in listed if (name := default_metric(run)) is not None]
    return [max(names, key=names.count)] if names else []


def _rank(value: float | None, *, is_higher: bool) -> tuple[bool, float]:
    """Return a key for sorting: better values first, then runs without one."""
    if value is None or math.isnan(value):
        return True, 0.0
    return False, -value if is_higher else value


def _row(run: RecordedRun, metrics: Sequence[str]) -> list[str]:
    values = [run.last_values.get(name) for name in metrics]
    return [
        run.name,
        run.status,
        describe_strategy(run),
        str(run.main.step),
        describe_seconds(run.seconds),
        describe_time(run.begin_time),
        *("" if value is None else f"{value:.4g}" for value in values),
    ]


def describe_strategy(run: RecordedRun) -> str:
    """Return strategy and number of ranks, such as ``"ddp x2"``."""
    plan = run.plan
    return f"{plan['strategy_alias']} x{plan['world_size']}" if plan["world_size"] > 1 else str(plan["strategy_alias"])


def describe_seconds(seconds: float) -> str:
    """Return a duration, such as ``"4.1 s"``, ``"12:03"`` or ``"3:12:03"``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_time(seconds: float) -> str:
    """Return a point in time without the parts that it shares with now: the hour today, the day this year."""
    then, now = time.localtime(seconds), time.localtime()
    if then[:3] == now[:3]:
        return time.strftime("%H:%M", then)
    return time.strftime("%d %b %H:%M" if then[0] == now[0] else "%d %b %Y", then)


def _as_dict(run: RecordedRun) -> dict[str, Any]:
    return {
        "folder": str(run.folder.absolute()),
        "status": run.status,
        "reason": run.stages[-1].reason,
        "begin": run.begin_time,
        "seconds": run.seconds,
        "step": run.main.step,
        "module": run.main.begin["module"],
        "arguments": run.main.begin["arguments"],
        "hyperparameters": run.hyperparameters,
        "plan": run.plan,
        "environment": run.main.begin["environment"],
        "values": run.last_values,
        "memory": (run.main.end or {}).get("memory", []),
        "phases": (run.main.end or {}).get("phases", {}),
        "checkpoints": [checkpoint["path"] for stage in run.stages for checkpoint in stage.checkpoints],
        "stages": [
            {"stage": each.stage, "attempt": each.begin["attempt"], "status": each.status} for each in run.stages
        ],
    }
