"""Ranks that ended before the others, where another launcher supervises them.

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
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dstrat.interfaces.cluster import this_machine
from dstrat.launch.failures import kind_of, list_ranks, text_of
from dstrat.launch.progress import has_ended
from dstrat.launch.rank import this_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dstrat.parallel.job import Job

_ENDING_SECONDS = 1.0  # that a rank may take to end after its failure
_NUM_NAMED = 16
_PAUSE = _ENDING_SECONDS / 20

_log = logging.getLogger(__name__)

T = TypeVar("T")


def name_ended_ranks(error: BaseException) -> None:
    """Note on the error of a lost connection which ranks have ended or failed, where no supervisor names them.

    They may have ended because of the same failure.  Call it while the process group is open.  It waits a moment for
    ranks that are about to end, and continues those that a signal has stopped.

    Args:
        error: What this rank fails with; other errors than that of a lost connection or a timeout stay as they are.
    """
    job = _current_job()
    if not isinstance(error, Exception) or job is None:
        return
    # The supervisor sees all ranks of a job on one machine, which share a file.
    if this_rank() is not None and job.cluster.store_file is not None:
        return
    kind = kind_of(error)
    processes = _read_processes(job)
    if processes is None:  # the store is gone; an own error says enough without it
        if kind != "error" and job.address is not None:
            _note(error, f"rank 0 at {job.address} does not respond: it has ended, or its machine is not reachable")
        return
    machines = {machine for _, machine in processes.values()}
    if len(machines) > 1:  # peers of this machine look up its process instead
        # Nothing if it has only lost its peers, so that these are named.
        text = f"{type(error).__name__}: {text_of(error)}".partition("\n")[0] if kind == "error" else ""
        _call_for(_ENDING_SECONDS, partial(job.write_failure_report, text))
    if kind == "error":
        return
    nearby = {rank: pid for rank, (pid, machine) in processes.items() if machine == this_machine()}
    # This rank is about to end, on which torchrun sends SIGTERM to the others.
    continue_stopped(nearby.values())
    if kind == "lost" and (ended := _wait_for_end_of_any(nearby, _ENDING_SECONDS)):
        verb = "have" if len(ended) > 1 else "has"
        _note(error, f"{list_ranks(ended[:_NUM_NAMED])} of {len(processes)} {verb} ended already")
    elif len(machines) > 1:
        for note in _describe_remote_failures(job, processes):
            _note(error, note)


def _current_job() -> Job | None:
    """Return the job of this process; None in a process that communicates with no other one."""
    if "dstrat.parallel.job" not in sys.modules:  # hence no import at the top of this module: it needs torch
        return None
    from dstrat.parallel.job import current_job

    return current_job()


def _note(error: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:  # Python 3.10 has no notes
        _log.error(note)


# Failures on other machines, through the job's store


_REPORT_SECONDS = 2.0  # that ranks may take to report, after the first of them has lost a connection


def _describe_remote_failures(job: Job, processes: Mapping[int, tuple[int, str]]) -> list[str]:
    """Return which ranks of other machines have failed by themselves; if none, which of them are silent."""
    size = len(processes)
    hosts = {rank: machine.partition(" ")[0] for rank, (_, machine) in processes.items()}
    remote = [rank for rank, (_, machine) in processes.items() if machine != this_machine()]
    deadline = time.monotonic() + _REPORT_SECONDS
    pause = max(_PAUSE, 3e-4 * size)  # limits the requests to the store, three of each rank, to 10,000 in a second
    while True:
        reports = _call_for(_ENDING_SECONDS, job.read_failure_reports)
        if reports is None:
            return [f"rank 0 of {size} on {hosts[0]!r} does not respond: it has ended, or its machine is not reachable"]
        failed = [rank for rank in remote if reports.get(rank)]
        silent = [rank for rank in remote if rank not in reports]
        if failed or not silent or time.monotonic() > deadline:
            break
        time.sleep(pause)
    notes = [f"rank {rank} of {size} on {hosts[rank]!r} has failed: {reports[rank]}" for rank in failed]
    return (
        notes
        or [
            f"rank {rank} of {size} on {hosts[rank]!r} has reported no failure: it was killed, or its machine is not "
            "reachable, or it is at work"
            for rank in silent
        ]
    )[:_NUM_NAMED]


def _call_for(seconds: float, function: Callable[[], T]) -> T | None:
    """Return the result of a function that uses the store; None if it fails, or takes longer.

    It runs in a thread, as an operation of a store whose server is gone may block.
    """
    results: list[T] = []

    def call() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(function())

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


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
    if _has_ended_peers(is_over):
        os.kill(os.getpid(), signal.SIGTERM)  # a second signal interrupts at once


def _has_ended_peers(is_over: threading.Event) -> bool:
    """Wait until a rank of this machine has ended and this one goes on; return False if the run is over before."""
    job = _current_job()
    all_processes = (None if job is None else _read_processes(job)) or {}
    processes = {rank: pid for rank, (pid, machine) in all_processes.items() if machine == this_machine()}
    while not any(map(has_ended, processes.values())):
        if is_over.wait(_PAUSE) or not processes:
            return False
    return not is_over.wait(_ENDING_SECONDS)  # as this rank may be about to report the lost connection


class SignalWatch(threading.Thread):
    """Thread that obeys a SIGTERM in place of the main thread, if that waits in native code and a peer has ended.

    Python runs a handler in the main thread, between two instructions.  A main thread that waits for its GPU comes to
    none if the kernel there waits for a rank that has ended.  So the thread reads the numbers of signals from a pipe,
    which Python writes when they arrive.  Where the program has another such pipe, as event loops do, it reads nothing.

    Args:
        is_handled: Returns whether the main thread has run the handler, which ends the process then.
        is_over: Set when the run has reached the end of its step, and ends in order.
    """

    def __init__(self, is_handled: Callable[[], bool], is_over: threading.Event) -> None:
        super().__init__(name="dstrat-signal-watch", daemon=True)
        self._is_handled, self._is_over = is_handled, is_over
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # as Python requires
        previous = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
        _pipes_of_signals.add(self._writer)
        self.start()

    def run(self) -> None:
        numbers = b""
        while 0 not in numbers:  # also after a signal, as Python reports an error if nobody reads the next one
            numbers = os.read(self._reader, 64)
            is_ended = signal.SIGTERM in numbers and 0 not in numbers
            if is_ended and _has_ended_peers(self._is_over) and not self._is_handled():
                os._exit(128 + signal.SIGTERM)  # the code of shells: another thread cannot do what a second signal does
        os.close(self._reader)

    def close(self) -> None:
        """End the watch, in the main thread."""
        current = signal.set_wakeup_fd(-1)
        if current != self._writer:
            signal.set_wakeup_fd(current)
        # Not by the end of the file: forked processes have copies of the descriptor.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writer, b"\0")
        _pipes_of_signals.discard(self._writer)
        os.close(self._writer)


# Of the process, as Python's wakeup descriptor is: after a fork its number says whether it is one of these.
_pipes_of_signals: set[int] = set()


def _forget_signals_in_child() -> None:
    """Disconnect a forked process, whose signals are not this one's, from the pipe."""
    if _pipes_of_signals:
        current = signal.set_wakeup_fd(-1)
        if current not in _pipes_of_signals:
            signal.set_wakeup_fd(current)


os.register_at_fork(after_in_child=_forget_signals_in_child)


def watch_signals(is_handled: Callable[[], bool], is_over: threading.Event) -> SignalWatch | None:
    """Return a new watch of this process, in its main thread; None where a supervisor ends it, or it has no peers."""
    has_peers = this_rank() is None and _current_job() is not None
    return SignalWatch(is_handled, is_over) if has_peers else None


def _wait_for_end_of_any(processes: Mapping[int, int], seconds: float) -> list[int]:
    """Return the ranks whose processes have ended, as soon as there is one; empty if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (ended := [rank for rank, pid in processes.items() if has_ended(pid)]) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return ended


def _read_processes(job: Job) -> dict[int, tuple[int, str]] | None:
    """Return process and machine of each rank, from the store; None where it does not respond soon."""
    return _call_for(_ENDING_SECONDS, job.read_processes)
