"""Check for orphan processes and stale folders of earlier jobs."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.builtin.launchers.job import JOB_VARIABLE
from dstrat.cli.diagnosis.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_FOLDER_PREFIX = "dstrat-job-"  # as in builtin/launchers/job.py
_WATCHDOG = "dstrat-watchdog"  # as in builtin/launchers/watchdog.py; it lives as long as its job, and names the folder

_PAUSE = 0.5  # seconds
_SHOWN = 60  # characters of a command line


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    pid: int
    arguments: tuple[str, ...]
    job: str | None


def check_leftovers() -> Iterator[Finding]:
    """Tell of processes and folders of jobs that are over."""
    if not _PROC.is_dir():
        yield Finding(subject="leftovers", text="are not looked for on this platform", state="note")
        return
    first = _leftovers()
    if not any(first):
        yield Finding(subject="leftovers", text="none")
        return
    time.sleep(_PAUSE)  # a job that began or ended during the first look is gone from the second
    second = _leftovers()
    for pid, command in sorted(first[0] & second[0]):
        text = f"of a job that is over ({command[:_SHOWN]}): kill {pid}"
        yield Finding(subject=f"process {pid}", text=text, state="problem")
    folders = sorted(first[1] & second[1])
    if folders:
        text = f"{len(folders)} of jobs that are over: rm -r {' '.join(folders)}"
        yield Finding(subject="folders", text=text, state="note")


def _leftovers() -> tuple[set[tuple[int, str]], set[str]]:
    """Return the processes and the folders that belong to a job without a watchdog."""
    folders = {str(folder) for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*")}
    processes = list(_own_processes())
    running = {process.arguments[-1] for process in processes if _WATCHDOG in process.arguments}
    orphans = {
        (process.pid, " ".join(process.arguments))
        for process in processes
        if process.job is not None and process.job not in running
    }
    return orphans, folders - running


def _own_processes() -> Iterator[_Process]:
    """Yield the processes that we may look into: our own, on Linux."""
    for folder in _PROC.glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            environ = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or gone meanwhile
            continue
        variables = dict(item.partition("=")[::2] for item in environ)
        yield _Process(pid=int(folder.name), arguments=tuple(arguments), job=variables.get(JOB_VARIABLE))
