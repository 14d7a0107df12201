"""``dstrat report``: one HTML page about a run."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.runs.charts import COLORS, Curve, make_svg, render
from dstrat.cli.runs.command import describe_seconds, describe_strategy
from dstrat.cli.runs.record import Point, default_metric, select_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.cli.estimate.command import Estimate
    from dstrat.cli.runs.record import RecordedRun, StageRun

_STAGES = ("train_", "val_", "test_")
_INTERVALS = ("_step", "_epoch")
_PHASES = {
    "next_batch": "data",
    "transfer_batch": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "validation_step": "validation",
}
_MOST_TILES = 4  # of logged values
_GIB = 1024**3


@click.command(short_help="Write one HTML page about a run.")
@click.argument("run", default="last")
@click.option("--output", type=click.Path(path_type=Path), help="The file; by default report.html in the run's folder.")
@click.option("--model", help="Function that returns the training, for the estimated memory, as for dstrat estimate.")
@click.option("--batch-size", type=click.IntRange(1), help="Of a rank, for the estimate.")
def report(run: str, output: Path | None, model: str | None, batch_size: int | None) -> None:
    """Write one HTML page about a run: curves, throughput, memory, time line, checkpoints, plan and environment.

    A run is named as for dstrat plot; by default it is the last one below the working directory.  The page is one file,
    needs no network, and follows the browser's light or dark mode.  It needs the extra dstrat[report].
    """
    (selected,) = select_runs([run])
    path = selected.folder / "report.html" if output is None else output
    page = render("report.html.jinja", **_content(selected, _estimate(selected, model, batch_size)))
    path.write_text(page, encoding="utf-8")
    click.echo(f"wrote {path}")


def _estimate(run: RecordedRun, model: str | None, batch_size: int | None) -> Estimate | None:
    """Return the estimated memory of a rank, for the strategy and the devices of a run."""
    if model is None:
        return None
    from dstrat.cli.components import loaded_catalog
    from dstrat.cli.estimate.command import make_estimates  # imports torch, and the user's module

    plan = run.plan
    estimates, _ = make_estimates(
        loaded_catalog(),
        model,
        (plan["strategy_alias"],),
        accelerator=plan["accelerator"],
        devices=plan["num_devices"],
        num_nodes=plan["num_nodes"],
        precision=plan["precision"],
        batch_size=batch_size,
    )
    return estimates[0] if estimates else None


def _content(run: RecordedRun, estimate: Estimate | None) -> dict[str, Any]:
    environment = {**run.main.begin["environment"]}
    environment["variables"] = " ".join(f"{key}={value}" for key, value in environment["variables"].items())
    command = shlex.join(run.main.begin["command"])
    measured = _throughput(run.main)
    return {
        "title": run.name,
        "run": run,
        "reason": run.stages[-1].reason,
        "strategy": describe_strategy(run),
        "begin": _describe_moment(run.begin_time),
        "facts": _facts(run),
        "charts": [make_svg(name, curves) for name, curves in _charts(run)],
        "throughput": make_svg("throughput", [Curve("", measured)], unit="steps per second")
        if len(measured) > 1
        else None,
        "speed": _describe_speed(run.main),
        "phases": _phases(run.main),
        "memory": _memory(run.main, estimate),
        "estimate": _describe_estimate(run, estimate),
        "segments": list(_segments(run)),
        "checkpoints": [_checkpoint(run, event) for stage in run.stages for event in stage.checkpoints],
        "environment": {"command": command, **{key: value for key, value in environment.items() if value}},
    }


def _facts(run: RecordedRun) -> dict[str, str]:
    """Return the facts at the top of the page by name."""
    first = default_metric(run)
    names = sorted(run.last_values, key=lambda name: (name != first, not name.startswith("val"), name))
    values = {name: f"{run.last_values[name]:.4g}" for name in names[:_MOST_TILES]}
    return {**values, "optimizer steps": str(run.main.step), "time": describe_seconds(run.seconds)}


def _charts(run: RecordedRun) -> Iterator[tuple[str, list[Curve]]]:
    """Yield a title and curves for each quantity; those of training and validation share a chart."""
    groups: defaultdict[str, list[Curve]] = defaultdict(list)
    for name, points in run.curves.items():
        title = name
        for stage in _STAGES:
            title = title.removeprefix(stage)
        for interval in _INTERVALS:
            title = title.removesuffix(interval)
        groups[title].append(Curve(name, points))
    yield from groups.items()


# Throughput and phases


def _throughput(stage: StageRun) -> list[Point]:
    """Return the optimizer steps per second between recorded epochs, with what happens in between."""
    events = [*stage.epochs, *([stage.end] if stage.end is not None and "step" in stage.end else [])]
    return [
        Point(after["step"], (after["step"] - before["step"]) / (after["time"] - before["time"]))
        for before, after in pairwise(events)
        if after["step"] > before["step"] and after["time"] > before["time"]
    ]


def _describe_speed(stage: StageRun) -> str:
    if not stage.epochs:
        return "This run has trained no epoch."
    first = stage.epochs[0]
    last = max((*stage.epochs, *stage.checkpoints, *([stage.end] if stage.end else [])), key=lambda one: one["time"])
    steps, seconds = last.get("step", 0) - first["step"], last["time"] - first["time"]
    if steps <= 0 or seconds <= 0:
        return "No optimizer step is recorded."
    set_up = describe_seconds(first["time"] - stage.begin_time)
    return (
        f"{steps} steps in {describe_seconds(seconds)}, {steps / seconds:.4g} per second with validation and "
        f"checkpoints. Until the first epoch {set_up} were for the set-up."
    )


def _phases(stage: StageRun) -> list[dict[str, Any]]:
    """Return the share of each phase in the time of a run; empty where a profiler has not measured it."""
    measured = (stage.end or {}).get("phases", {})
    totals = {name: value for name, value in measured.items() if name != "setup"}  # before the first epoch
    if not totals:
        return []
    seconds = dict.fromkeys((*_PHASES.values(), "hooks and callbacks"), 0.0)
    for name, value in totals.items():
        seconds[_PHASES.get(name, "hooks and callbacks")] += value
    begin = stage.epochs[0]["time"] if stage.epochs else stage.begin_time
    seconds["everything else"] = max(0.0, stage.end_time - begin - sum(seconds.values()))
    total = sum(seconds.values())
    return [
        {
            "name": name,
            "percent": f"{100 * value / total:.2f}",
            "text": f"{describe_seconds(value)}, {100 * value / total:.0f} %",
            "color": COLORS[number % len(COLORS)],
        }
        for number, (name, value) in enumerate(seconds.items())
        if value > 0.001 * total
    ]


# Memory


def _memory(stage: StageRun, estimate: Estimate | None) -> list[dict[str, Any]]:
    """Return a bar for the largest memory of each rank, and one for the estimate."""
    rows: list[tuple[str, int, str, str]] = []
    for rank, sizes in enumerate((stage.end or {}).get("memory", [])):
        grown = sizes["host"] - sizes["host_before"]
        if sizes["device"]:
            rows.append((f"rank {rank}", sizes["device"], f"{_gib(sizes['device'])} on its device", COLORS[0]))
        else:
            text = f"{_gib(grown)} more than before the run; the process {_gib(sizes['host'])}"
            rows.append((f"rank {rank}", grown, text, COLORS[0]))
    if estimate is not None:
        rows.append(("estimate", estimate.peak, f"{_gib(estimate.peak)} for each rank", COLORS[1]))
    largest = max((size for _, size, _, _ in rows), default=0) or 1
    return [
        {"name": name, "percent": f"{100 * size / largest:.2f}", "text": text, "color": color}
        for name, size, text, color in rows
    ]


def _describe_estimate(run: RecordedRun, estimate: Estimate | None) -> str:
    if estimate is None:
        return (
            f"dstrat report {run.name} --model package.module:factory adds the estimate, as dstrat estimate makes it."
        )
    from dstrat.cli.estimate.command import memory_text

    peak, parts = memory_text(estimate)
    return f"Estimate {peak}: {parts}. It counts tensors, and not the libraries of the process."


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


# Time line and checkpoints


def _segments(run: RecordedRun) -> Iterator[dict[str, Any]]:
    begin = run.begin_time
    total = max(stage.end_time for stage in run.stages) - begin or 1.0

    def percent(moment: float) -> str:
        return f"{100 * moment / total:.2f}"

    for stage in run.stages:
        seconds = stage.end_time - stage.begin_time
        yield {
            "stage": stage.stage,
            "attempt": stage.begin["attempt"],
            "status": stage.status,
            "reason": stage.reason,
            "traceback": _traceback(stage),
            "begin": _describe_moment(stage.begin_time),
            "time": describe_seconds(seconds),
            "step": stage.step or "",
            "left": percent(stage.begin_time - begin),
            "width": percent(seconds),
            "title": f"{stage.stage}, attempt {stage.begin['attempt']}: {stage.status}",
            "marks": [
                {"left": percent(event["time"] - begin), "title": f"checkpoint after step {event['step']}"}
                for event in stage.checkpoints
            ],
        }


def _traceback(stage: StageRun) -> str:
    # The supervisor's names the rank that was the cause; rank 0 may have lost the connection to it.
    return str((stage.failure or stage.end or {}).get("traceback", ""))


def _checkpoint(run: RecordedRun, event: Mapping[str, Any]) -> dict[str, Any]:
    path = str(event["path"])
    is_local = "://" not in path
    return {
        "path": path,
        "step": event["step"],
        "time": _describe_moment(event["time"]),
        "seconds": event["seconds"],
        "state": "" if not is_local or (run.folder / path).exists() else "removed since",
    }


def _describe_moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
