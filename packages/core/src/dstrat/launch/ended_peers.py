"""Ranks of this machine that ended before the others, where another launcher supervises them.

torchrun takes an exit with code 0 for a success, and names only the ranks that fail because of it.  It ends the other
ranks by SIGTERM, which has no effect on a stopped process and which a run obeys at its next step; after 30 seconds it
kills them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from dstrat.interfaces.cluster import this_machine
from dstrat.launch.failures import kind_of
from dstrat.launch.progress import has_ended
from dstrat.launch.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ENDING_SECONDS = 1.0  # that a rank may take to end after its failure
_NUM_NAMED = 16
_PAUSE = _ENDING_SECONDS / 20

_log = logging.getLogger(__name__)


def name_ended_ranks(error: BaseException) -> None:
    """Note on the error of a lost connection which ranks of this machine have ended, where no supervisor names them.

    They may have ended because of the same failure.  Call it while the process group is open.  It waits a moment for
    ranks that are about to end, and continues those that a signal has stopped.

    Args:
        error: What this rank fails with; other errors than that of a lost connection or a timeout stay as they are.
    """
    kind = kind_of(error)
    if this_rank() is not None or kind == "error":
        return
    processes = _read_processes()
    nearby = {rank: pid for rank, (pid, machine) in processes.items() if machine == this_machine()}
    continue_stopped(nearby.values())
    if kind == "lost" and (ended := _wait_for_end_of_any(nearby, _ENDING_SECONDS)):
        numbers = ", ".join(str(rank) for rank in ended[:_NUM_NAMED])
        verb = "ranks {} of {} have" if len(ended) > 1 else "rank {} of {} has"
        note = f"{verb.format(numbers, len(processes))} ended already"
        if sys.version_info >= (3, 11):
            error.add_note(note)
        else:
            _log.error(note)


def continue_stopped(pids: Iterable[int]) -> None:
    """Continue processes that a signal has stopped, so that they take the SIGTERM of their launcher."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)  # has no effect on a process that runs


def obey_when_peers_end(number: int, is_over: threading.Event) -> None:
    """Let a SIGTERM take effect at once, rather than at the next step, when a rank of this machine has ended.

    There is no next step then, as the collectives of a step need all ranks.

    Args:
        number: The signal that has arrived.
        is_over: Set when the run has reached the end of its step, and ends in order.
    """
    if number == signal.SIGTERM and this_rank() is None:
        threading.Thread(target=_repeat_when_peers_end, args=(is_over,), daemon=True).start()


def _repeat_when_peers_end(is_over: threading.Event) -> None:
    processes = {rank: pid for rank, (pid, machine) in _read_processes().items() if machine == this_machine()}
    while not any(map(has_ended, processes.values())):
        if is_over.wait(_PAUSE) or not processes:
            return
    if not is_over.wait(_ENDING_SECONDS):  # as this rank may be about to report the lost connection
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal interrupts at once


def _wait_for_end_of_any(processes: Mapping[int, int], seconds: float) -> list[int]:
    """Return the ranks whose processes have ended, as soon as there is one; empty if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (ended := [rank for rank, pid in processes.items() if has_ended(pid)]) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return ended


def _read_processes() -> dict[int, tuple[int, str]]:
    """Return process and machine of each rank, from the store; empty where that takes long, as its server is frozen."""
    from dstrat.parallel.process_group import read_processes

    processes: dict[int, tuple[int, str]] = {}
    # A thread, as a look into a store whose server does not answer has no time limit.
    reader = threading.Thread(target=lambda: processes.update(read_processes()), daemon=True)
    reader.start()
    reader.join(_ENDING_SECONDS)
    return dict(processes)
