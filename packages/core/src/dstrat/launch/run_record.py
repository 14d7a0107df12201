"""Record of a run: events as JSON lines in its log folder.

Global rank 0 appends the events of a run.  The supervisor of the ranks appends the failure of a job after they have
ended, so that there is one writer at a time.  Readers, such as ``dstrat runs``, import neither torch nor the Trainer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.launch.progress import has_ended, start_of
from dstrat.launch.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.errors import RankFailedError

RECORD_FILE = "run.jsonl"
"""Name of the file in the log folder of a run."""

_LINK_FILE = "run-record"  # in the job's folder: tells the supervisor the log folder, which the ranks choose


def append_event(log_dir: Path, kind: str, **values: Any) -> None:
    """Add an event with the current time to the record of a run.

    The line is written by one call, so that a process that is killed leaves at most its last line incomplete.

    Args:
        log_dir: The log folder.
        kind: ``"begin"``, ``"epoch"``, ``"checkpoint"``, ``"failure"`` or ``"end"``.
        **values: Values for JSON; of other objects the ``repr`` is written.

    Raises:
        OSError: The file cannot be written.
    """
    line = json.dumps({"event": kind, "time": round(time.time(), 3), **values}, default=repr) + "\n"
    with (log_dir / RECORD_FILE).open("a+b", buffering=0) as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the last line of a process that was killed
                line = f"\n{line}"
        file.write(line.encode())


def read_events(log_dir: Path) -> list[dict[str, Any]]:
    """Return the events of a record, without incomplete lines; empty where there is none."""
    events = []
    with contextlib.suppress(OSError):
        for line in (log_dir / RECORD_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event and "time" in event:
                    events.append(event)
    return events


# Whether the process of a run still exists


def this_process() -> dict[str, Any]:
    """Return what identifies this process, as values for JSON."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "start": start_of(os.getpid())}


def is_running(process: Mapping[str, Any]) -> bool | None:
    """Return whether a process still runs; None for one of another machine.

    Args:
        process: The result of :func:`this_process` there.
    """
    if process["host"] != socket.gethostname():
        return None
    # Another process may have the number by now, which has started later.
    return not has_ended(process["pid"]) and start_of(process["pid"]) == process["start"]


# Failures of a job, which its supervisor records


def link_record(log_dir: Path) -> None:
    """Write for the supervisor of this rank where the record of the run is."""
    rank = this_rank()
    if rank is not None:
        with contextlib.suppress(OSError):  # the folder may have been removed
            (rank.folder / _LINK_FILE).write_text(str(log_dir.absolute()), encoding="utf-8")


def unlink_record() -> None:
    """Undo :func:`link_record`, after the end of the run."""
    rank = this_rank()
    if rank is not None:
        (rank.folder / _LINK_FILE).unlink(missing_ok=True)


def record_failure(job_folder: Path, error: RankFailedError) -> None:
    """Add the failure of a job to the record of its run, if the run has begun one; called when all ranks have ended."""
    with contextlib.suppress(OSError):  # it must not hide the failure itself
        log_dir = Path((job_folder / _LINK_FILE).read_text(encoding="utf-8"))
        summary = str(error).strip().partition("\n")[0]
        append_event(log_dir, "failure", rank=error.rank, summary=summary, traceback=error.rank_traceback)
