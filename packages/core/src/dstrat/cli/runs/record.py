"""Recorded runs: search, status, and logged values."""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dstrat.errors import RequestError
from dstrat.launch.run_record import RECORD_FILE, is_running, read_events
from dstrat.plugins.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_DEPTH = 4  # of folders below the one that is searched
_NOT_SEARCHED = ("checkpoints", "node_modules", "site-packages", "__pycache__")
_COUNTERS = ("step", "epoch")


class Point(NamedTuple):
    """A logged value."""

    step: int
    value: float


@dataclass(kw_only=True)
class StageRun:
    """One fit, validation, test or prediction, or one attempt of it.

    Attributes:
        begin: The event of its begin.
        end: The event of its end; None if the process could not write one.
        failure: The failure that the supervisor has recorded; None without one.
        epochs: The events of the begins of epochs.
        checkpoints: The events of checkpoints.
    """

    begin: dict[str, Any]
    end: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    epochs: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stage(self) -> str:
        """The method of the Trainer."""
        return str(self.begin["stage"])

    @cached_property
    def status(self) -> str:
        """How it ended: completed, failed, interrupted or killed; running, or unknown on another machine."""
        if self.failure is not None:
            return "failed"
        if self.end is not None:
            return str(self.end["status"])
        running = is_running(self.begin["process"])
        return "unknown" if running is None else "running" if running else "killed"

    @property
    def begin_time(self) -> float:
        """When it began, in seconds since the epoch of the system."""
        return float(self.begin["time"])

    @property
    def end_time(self) -> float:
        """When it ended, or its process was last seen; now, while it runs."""
        if self.status == "running":
            return time.time()
        last = [event for event in (self.end, self.failure) if event is not None]
        return max(float(event["time"]) for event in (last or (self.begin, *self.epochs, *self.checkpoints)))

    @property
    def step(self) -> int:
        """Number of optimizer steps at its end, as far as that is recorded."""
        events = (*self.epochs, *self.checkpoints, self.end or {})
        return max((int(event["step"]) for event in events if "step" in event), default=0)

    @property
    def reason(self) -> str:
        """Why it failed or was interrupted, in one line."""
        if self.failure is not None:
            return str(self.failure["summary"])
        return str((self.end or {}).get("error", ""))


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A recorded run: all that was written to one log folder.

    Attributes:
        folder: The folder.
        stages: What was run, in order; at least one.
    """

    folder: Path
    stages: tuple[StageRun, ...]

    @property
    def name(self) -> str:
        """The folder, relative to the working directory where it is below that."""
        try:
            return str(self.folder.absolute().relative_to(Path.cwd()))
        except ValueError:
            return str(self.folder)

    @property
    def main(self) -> StageRun:
        """The last fit, or the last stage where there was none."""
        return next((stage for stage in reversed(self.stages) if stage.stage == "fit"), self.stages[-1])

    @property
    def status(self) -> str:
        """The status of the stage that has ended last."""
        return self.stages[-1].status

    @property
    def begin_time(self) -> float:
        """When it began, in seconds since the epoch of the system."""
        return self.stages[0].begin_time

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.end_time - stage.begin_time for stage in self.stages)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the main stage."""
        return dict(self.main.begin["plan"])

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that a logger has written beside the record."""
        try:
            content = json.loads((self.folder / "hparams.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return {}
        return content if isinstance(content, dict) else {}

    @property
    def metrics_file(self) -> Path | None:
        """The CSV file with the logged values; None if no logger has written one."""
        name = self.main.begin.get("metrics")
        path = None if name is None else self.folder / name
        return path if path is not None and path.is_file() else None

    @cached_property
    def curves(self) -> dict[str, list[Point]]:
        """The logged values by name, in the order in which they were logged."""
        curves: dict[str, list[Point]] = {}
        if self.metrics_file is not None:
            with self.metrics_file.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    for name, text in row.items():
                        if name not in _COUNTERS and text:
                            curves.setdefault(name, []).append(Point(int(row["step"]), float(text)))
        return curves

    @cached_property
    def last_values(self) -> dict[str, float]:
        """The last value of each name: from the CSV file, or the end of each stage where there is none."""
        values: dict[str, float] = {}
        for stage in self.stages:
            values |= (stage.end or {}).get("metrics", {})
        return values | {name: curve[-1].value for name, curve in self.curves.items()}


def read_run(folder: Path) -> RecordedRun | None:
    """Return the run of a log folder; None if it has no record."""
    stages: list[StageRun] = []
    for event in read_events(folder):
        kind = event["event"]
        if kind == "begin":
            stages.append(StageRun(begin=event))
        elif not stages:
            continue
        elif kind == "end":
            stages[-1].end = event
        elif kind == "failure":
            stages[-1].failure = event
        elif kind == "epoch":
            stages[-1].epochs.append(event)
        elif kind == "checkpoint":
            stages[-1].checkpoints.append(event)
    return RecordedRun(folder=folder, stages=tuple(stages)) if stages else None


def find_runs(roots: Iterable[Path]) -> list[RecordedRun]:
    """Return the runs in folders and a few levels below, the oldest first."""
    folders = dict.fromkeys(folder for root in roots for folder in _log_folders(root, _DEPTH))
    runs = [run for folder in folders if (run := read_run(folder)) is not None]
    return sorted(runs, key=lambda run: (run.begin_time, run.name))


def _log_folders(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:  # not readable, or removed meanwhile
        return
    if any(entry.name == RECORD_FILE for entry in entries):
        yield folder
    if depth:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.name[0] != "." and entry.name not in _NOT_SEARCHED:
                yield from _log_folders(folder / entry.name, depth - 1)


def select_runs(names: Sequence[str]) -> list[RecordedRun]:
    """Return the runs that a user names: by folder, by the end of its path, such as ``version_3`` or ``3``, or "last".

    Raises:
        RequestError: A name is that of no run, or of several.
    """
    return [_select(name) for name in names]


def _select(name: str) -> RecordedRun:
    run = read_run(Path(name))
    if run is not None:
        return run
    runs = find_runs([Path()])
    if name == "last" and runs:
        return runs[-1]
    matches = [run for run in runs if run.folder.name in (name, f"version_{name}") or run.name.endswith(f"/{name}")]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = " or ".join(run.name for run in matches)
        raise RequestError(f"{name!r} is the name of {len(matches)} runs: write {names}")
    known = [run.name for run in runs]
    near = nearest(name, known)
    hint = f"did you mean {' or '.join(near)}?" if near else "dstrat runs lists those that there are"
    raise RequestError(f"there is no run {name!r} here: {hint}")


def check_metric(name: str, runs: Sequence[RecordedRun]) -> None:
    """Check that a run has logged a value of this name.

    Raises:
        RequestError: None has; the message has the names that there are.
    """
    known = sorted({name for run in runs for name in run.last_values})
    if name not in known:
        near = nearest(name, known)
        listed = f"there are {', '.join(known)}" if known else "none has logged any value"
        hint = f"did you mean {' or '.join(near)}?" if near else listed
        raise RequestError(f"no run has logged {name!r}: {hint}")


def default_metric(run: RecordedRun) -> str | None:
    """Return the name of a run's most telling value: the one that ranks its checkpoints, or a loss."""
    monitor = run.main.begin.get("monitor")
    if monitor is not None and monitor["name"] in run.last_values:
        return str(monitor["name"])
    losses = [name for name in run.last_values if "loss" in name]
    return min(losses, key=lambda name: (not name.startswith("val"), len(name)), default=None)


def is_higher_better(metric: str, runs: Sequence[RecordedRun]) -> bool:
    """Return whether larger values of a metric are better, as a ModelCheckpoint of a run says; False if none does."""
    monitors = [run.main.begin.get("monitor") for run in runs]
    return any(each is not None and each["name"] == metric and each["mode"] == "max" for each in monitors)
