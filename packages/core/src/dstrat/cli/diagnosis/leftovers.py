"""What earlier jobs have left behind: processes whose supervisor is gone, and folders."""

from __future__ import annotations

import tempfile
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    pid: int
    arguments: tuple[str, ...]
    job: str | None


def check_leftovers() -> Iterator[Finding]:
    """Tell of processes and folders of jobs that are over."""
    processes = list(_own_processes())
    running = {process.arguments[-1] for process in processes if _WATCHDOG in process.arguments}
    orphans = [process for process in processes if process.job is not None and process.job not in running]
    folders = [
        folder for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*") if str(folder) not in running
    ]
    for process in orphans:
        text = f"belongs to a job that is over ({' '.join(process.arguments)[:60]}): kill {process.pid}"
        yield Finding(subject=f"process {process.pid}", text=text, state="problem")
    if not _PROC.is_dir():
        yield Finding(subject="processes", text="are not looked for on this platform", state="note")
    elif folders:
        text = f"{len(folders)} of jobs that are over: rm -r {' '.join(map(str, sorted(folders)))}"
        yield Finding(subject="folders", text=text, state="note")
    if not orphans and not folders:
        yield Finding(subject="leftovers", text="none")


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
