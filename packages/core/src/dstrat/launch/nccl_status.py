"""NCCL's counts of collectives, which tell whether a rank waits for its peers.

On a GPU the stack does not: collectives return at once, and the host waits wherever the next value is read, or where
the queue of kernels is full, in any operation of the model.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PENDING, _NONE_PENDING = "NCCL: pending", "NCCL: nothing is pending"
_LINE = re.compile(rf"^{_PENDING}|^{_NONE_PENDING}", re.MULTILINE)

PERIOD = 2.0  # seconds between two notes
_STALE = 5 * PERIOD  # the thread that notes may lack the GIL


def describe_collectives(counts: Mapping[str, tuple[int, int]]) -> str:
    """Return a line for a rank's stack that says which of its collectives are pending.

    Args:
        counts: Numbers of the collectives that were begun last and completed last, by group.
    """
    pending = [f"{begun} of group {group}" for group, (begun, completed) in counts.items() if begun > completed]
    return f"{_PENDING}: collective {', '.join(pending)}" if pending else _NONE_PENDING


def has_pending(stack: str) -> bool | None:
    """Return whether a rank has a pending collective, by the line in its stack; None without such a line."""
    line = _LINE.search(stack)
    return None if line is None else line.group() == _PENDING


def wait_of(stack: str) -> str:
    """Return what stays the same while a rank waits: the line of pending collectives, or else its main thread's stack.

    With a full queue of kernels the host goes on from time to time, while the collective is the same.
    """
    if has_pending(stack) is None:
        return stack.rpartition("Current thread")[2]
    return stack[_LINE.search(stack).start() :]  # type: ignore[union-attr]  # there is one


def read_collectives() -> str | None:
    """Return the line for this process now; None where it does not use NCCL, or torch does not count."""
    if "dstrat.parallel.internals" not in sys.modules:  # then it communicates with no other process
        return None
    from dstrat.parallel.internals import nccl_counts

    with contextlib.suppress(Exception):  # a thread calls this, of a build of torch that may have changed
        if counts := nccl_counts():
            return describe_collectives(counts)
    return None


def read_note(folder: Path, pid: int) -> str | None:
    """Return the line that a rank noted last; None if there is none, or none of these seconds."""
    path = _path(folder, pid)
    with contextlib.suppress(OSError):
        if time.time() - path.stat().st_mtime < _STALE:
            return path.read_text()
    return None


class CollectivesNotes(threading.Thread):
    """Thread of a rank that notes its pending collectives for the supervisor.

    Args:
        folder: The job's folder.
        pid: The process id of the rank.
    """

    def __init__(self, folder: Path, pid: int) -> None:
        super().__init__(name="dstrat-nccl-notes", daemon=True)
        self._path, self._closed = _path(folder, pid), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._closed.wait(PERIOD):
            if (line := read_collectives()) is not None:
                with contextlib.suppress(OSError):  # the folder may have been removed
                    unfinished = self._path.with_suffix(".unfinished")
                    unfinished.write_text(line)
                    unfinished.replace(self._path)

    def close(self) -> None:
        """End the thread, and remove the note."""
        self._closed.set()
        self.join(PERIOD)
        with contextlib.suppress(OSError):
            self._path.unlink()


def _path(folder: Path, pid: int) -> Path:
    return folder / f"collectives-{pid}.txt"
