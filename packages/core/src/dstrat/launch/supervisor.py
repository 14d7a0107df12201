"""Watching the ranks of a job until all of them have ended, well or badly."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.errors import LaunchError, RankFailedError
from dstrat.launch.failures import RankEnd, failure_error, hang_error, read_failure, waits
from dstrat.launch.job import JOB_VARIABLE, STOP_FILE
from dstrat.launch.progress import RankWatch, descendants_of
from dstrat.launch.rank import STACK_SIGNAL, signal_file, stack_file
from dstrat.launch.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dstrat.launch.processes import RankProcess
    from dstrat.launch.signals import Interrupts

_POLL = 0.02  # seconds between two looks
_SETTLE_LOST = 3.0  # seconds for a rank to fail after others have lost it: it may be tidying up
_SETTLE_LATE = 0.75  # seconds for ranks to run out of patience one after the other
_DUMP = 0.5  # seconds for a rank to write its stack
_REAP = 5.0  # seconds for killed processes to go

_OUR_FOLDER = str(Path(__file__).parent)


class Supervisor:
    """The one who starts nothing and trains nothing, and therefore is there when a rank fails.

    Args:
        processes: The ranks; they may still be started.
        folder: The job's folder.
        world_size: Ranks of the whole job.
        spans_machines: Whether there are others on other machines.
        interrupts: Collects the signals to stop.
        grace: Seconds between asking a rank to end and killing it.
        stop_grace: Seconds for the ranks to stop in order, after the first signal to stop.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        folder: Path,
        *,
        world_size: int,
        spans_machines: bool,
        interrupts: Interrupts,
        grace: float,
        stop_grace: float,
    ) -> None:
        self.processes = processes
        self.folder = folder
        self.world_size = world_size
        self.interrupts = interrupts
        self.grace = grace
        self.stop_grace = stop_grace
        self.ends: dict[int, RankEnd] = {}
        self.stop_signal: signal.Signals | None = None
        self._enough = 1  # signals received here after which the ranks are ended at once
        self._deadline = float("inf")
        self._watch = RankWatch(folder, spans_machines=spans_machines)
        self._idle: dict[int, float] = {}  # limits in seconds of ranks that hang, by rank
        self._next_question, self._pause_of_questions = 0.0, 1.0

    def run(self) -> None:
        """Wait until all ranks have ended well.

        Raises:
            RankFailedError: A rank failed; all are ended.
            KeyboardInterrupt: The job was stopped by Ctrl-C; all are ended.
            SystemExit: The job was stopped by another signal; all are ended.
        """
        stacks: dict[int, str] = {}
        try:
            while not self._is_over():
                time.sleep(_POLL)
                if self.interrupts.pauses:
                    self._pause()
            if self._failures() or self._idle:
                stacks = self._stacks_of(self._running())
            elif not self.interrupts.received:
                self._report_external_signals()
        finally:
            self.end_all()
        self._report(stacks)

    def _is_over(self) -> bool:
        self._look()
        self._note_stop()
        if self._all_exited():
            self._look()
            return True
        if self.stop_signal is not None:
            return (
                len(self.interrupts.received) >= self._enough or time.monotonic() > self._deadline or self._has_cause()
            )
        if not self._failures():
            return self._has_hung()
        late = any(end.failure is not None and end.failure.kind == "timeout" for end in self._failures())
        self._wait_until(lambda: self._has_cause() or self._all_exited(), _SETTLE_LATE if late else _SETTLE_LOST)
        self._look()
        self._note_stop()
        return self.stop_signal is None

    # Looking

    def _look(self) -> None:
        """Note which ranks have ended or left a failure since the last look."""
        for process in self.processes:
            known = self.ends.get(process.rank)
            if known is None or known.exit_code is None:
                self._look_at(process)

    def _look_at(self, process: RankProcess) -> None:
        exit_code = process.poll()  # before the file is read: what has ended writes no more
        failure = read_failure(self.folder, process.pid)
        if exit_code is None and failure is None:
            return
        stacks = stack_file(self.folder, process.pid)
        crashed = exit_code is not None and exit_code < 0
        self.ends[process.rank] = RankEnd(
            rank=process.rank,
            exit_code=exit_code,
            failure=failure,
            time_ns=failure.time_ns if failure is not None else time.time_ns(),
            was_set_up=stacks.exists() or not self.folder.exists(),
            stack=_read_stack(stacks) if crashed else "",
        )

    def _failures(self) -> list[RankEnd]:
        return [end for end in self.ends.values() if end.is_failure and not self._obeyed(end)]

    def _has_cause(self) -> bool:
        self._look()
        return any(end.remoteness == 0 for end in self._failures())

    def _all_exited(self) -> bool:
        return not self._running()

    def _running(self) -> list[RankProcess]:
        return [process for process in self.processes if process.poll() is None]

    def _wait_until(self, is_true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_true() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _has_hung(self) -> bool:
        """Note which ranks do nothing any more, where no other rank is at work."""
        running = self._running()
        limits = self._watch.idle_ranks([process.pid for process in running])
        idle = {process.rank: limits[process.pid] for process in running if process.pid in limits}
        if idle and self._all_wait([process for process in running if process.rank not in idle]):
            self._idle = idle
        return bool(self._idle)

    def _all_wait(self, busy: list[RankProcess]) -> bool:
        """Return whether ranks that use a processor only wait for others: on a GPU waiting takes one."""
        if not busy:
            return True
        if time.monotonic() < self._next_question:
            return False
        self._next_question = time.monotonic() + self._pause_of_questions
        self._pause_of_questions *= 2  # a rank that is well is disturbed ever more rarely
        return all(waits(stack, is_busy=True) for stack in self._stacks_of(busy).values())

    # Stopping in order

    def _note_stop(self) -> None:
        """Begin to stop when a signal has arrived here, or when ranks have obeyed one that reached them directly."""
        if self.stop_signal is not None:
            return
        if self.interrupts.received:
            self.stop_signal = self.interrupts.received[0]
            self._enough = 2
            # A second signal would end those at once that somebody else has asked already (systemd, scancel --full).
            files = {process: signal_file(self.folder, process.pid) for process in self._running()}
            self._send(self.stop_signal, [process for process, file in files.items() if not file.exists()])
            _show(f"{self.stop_signal.name}: all ranks stop at the next step; a second one ends them at once")
        else:
            self.stop_signal = next(filter(None, map(_stopped_by, self.ends.values())), None)
        if self.stop_signal is not None:
            self._deadline = time.monotonic() + self.stop_grace
            # For ranks that wait for others to start, which may have obeyed already.
            with contextlib.suppress(OSError):
                (self.folder / STOP_FILE).write_text(str(int(self.stop_signal)))

    def _report_external_signals(self) -> None:
        """Print which ranks somebody else asked to stop, upon which all ranks have done so."""
        files = {process.rank: signal_file(self.folder, process.pid) for process in self.processes}
        asked = {rank: signal.Signals(int(file.read_text())) for rank, file in files.items() if file.exists()}
        if asked:
            ranks = f"rank{'s' if len(asked) > 1 else ''} {', '.join(map(str, asked))} of {self.world_size}"
            _show(
                f"{next(iter(asked.values())).name}: {ranks} received it from outside of this job, and all ranks have "
                "stopped after the same step"
            )

    def _pause(self) -> None:
        """Stop all ranks and this process, as Ctrl-Z asks, until the shell continues this process."""
        self._send_to_groups(signal.SIGSTOP)
        self.interrupts.pauses = False
        # By its usual effect, which the system leaves out where no shell could continue this process.
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._send_to_groups(signal.SIGCONT)
        self._watch.restart()

    def _obeyed(self, end: RankEnd) -> bool:
        """Whether a rank's end is what was asked for."""
        killed = self.stop_signal is not None and end.exit_code == -self.stop_signal
        return killed or _stopped_by(end) is not None

    # Ending

    def _stacks_of(self, processes: Iterable[RankProcess]) -> dict[int, str]:
        """Let ranks that have neither ended nor failed show where they are."""
        silent = [process for process in processes if process.rank not in self.ends]
        files = {process.rank: stack_file(self.folder, process.pid) for process in silent}
        ready = [process for process in silent if files[process.rank].exists()]
        for process in ready:
            with contextlib.suppress(FileNotFoundError):  # somebody has removed the job's folder
                os.truncate(files[process.rank], 0)
        self._send(STACK_SIGNAL, ready)
        self._wait_until(lambda: all(map(_read_stack, files.values())), _DUMP)
        time.sleep(_POLL)  # the last one may still be writing
        return {rank: _read_stack(file) for rank, file in files.items()}

    def end_all(self) -> None:
        """End every rank, and whatever it has started: ask, wait a little, kill."""
        failed = bool(self._running()) or any(end.is_failure for end in self.ends.values())
        strays = self._strays() if failed else set()
        self._send(signal.SIGTERM, [process for process in self._running() if process.rank not in self.ends])
        self._wait_until(self._all_exited, self.grace)
        self._send_to_groups(signal.SIGKILL)
        if failed and (strays := self._alive(strays | self._strays())):
            self._send_to_all(strays, signal.SIGTERM)  # after the ranks, whose last words may need them
            self._wait_until(lambda: not self._alive(strays), self.grace)
            self._send_to_all(strays, signal.SIGKILL)
        self._send(signal.SIGKILL, self._running())  # a rank that had not yet made its group
        self._wait_until(self._all_exited, _REAP)

    def _strays(self) -> set[int]:
        """Return what the ranks have started in sessions of their own, by descent or by the environment."""
        mark = f"{JOB_VARIABLE}={self.folder}".encode()
        groups = {process.pid for process in self.processes}
        strays = set(descendants_of(process.pid for process in self._running()))
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    strays.add(int(entry.name))
        return {pid for pid in strays - groups if _group_of(pid) not in groups}

    def _alive(self, pids: Iterable[int]) -> set[int]:
        return {pid for pid in pids if _group_of(pid) is not None}

    def _send_to_all(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _send(self, number: signal.Signals, processes: Iterable[RankProcess]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _send_to_groups(self, number: signal.Signals) -> None:
        """Send a signal to the ranks and what they have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    # Telling

    def _folder_error(self, error: LaunchError) -> LaunchError:
        message = (
            f"{error}\n(the job's folder {str(self.folder)!r} was removed while the job ran, so that ranks could not "
            "leave their errors, which stand above: keep cleaners of temporary files away from dstrat-job-*)"
        )
        if isinstance(error, RankFailedError):
            return RankFailedError(message, rank=error.rank, exit_code=error.exit_code)
        return type(error)(message)

    def _report(self, stacks: dict[int, str]) -> None:
        """Raise what the end of the job means; nothing when all ranks have ended well, even if they were asked to."""
        if len(self.ends) == len(self.processes) and not any(end.is_failure for end in self.ends.values()):
            return
        error: LaunchError | None = None
        failures = self._failures()
        if self._idle and not failures:
            error = hang_error(self._idle, stacks, self.world_size)
        if failures:
            well = [end for end in self.ends.values() if not end.is_failure]
            error = failure_error([*failures, *well], stacks, self.world_size)
        if self.stop_signal is None and error is not None:
            raise error if self.folder.exists() else self._folder_error(error)
        cause = error if any(end.remoteness == 0 for end in failures) else None
        if self.stop_signal in (signal.SIGINT, None):
            raise KeyboardInterrupt from cause
        raise SystemExit(128 + self.stop_signal) from cause


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _show(line: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone, which is what SIGHUP says
        print(line, file=sys.stderr, flush=True)


def _stopped_by(end: RankEnd) -> signal.Signals | None:
    """Return the signal that a rank has obeyed when it stopped in order, by the exit code that shells use."""
    if end.failure is not None or end.exit_code is None:
        return None
    return next((number for number in STOP_SIGNALS if end.exit_code == 128 + number), None)


def _read_stack(file: Path) -> str:
    """Return the stacks in a file, without the launcher's own threads and outermost frames."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    threads = [lines for thread in text.split("\n\n") if (lines := _users_frames(thread.strip("\n").splitlines()))]
    return "\n\n".join("\n".join(lines) for lines in threads)


def _users_frames(thread: list[str]) -> list[str]:
    """Return the lines of a thread's stack but for the launcher's outermost frames; nothing where it has no others."""
    forked = next((index for index, line in enumerate(thread) if line.endswith(" in _run_forked")), len(thread))
    frames = thread[1:forked]  # the others are of the process that was forked
    while frames and (_OUR_FOLDER in frames[-1] or threading.__file__ in frames[-1]):
        frames.pop()
    return [*thread[:1], *frames] if frames or len(thread) == 1 else []
