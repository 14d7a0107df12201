"""Supervisor of a job's ranks: waits for them, stops them, ends them, and reports the primary failure."""

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
from dstrat.launch.elastic import READY
from dstrat.launch.failures import RankEnd, describe_stacks, failure_error, hang_error, list_ranks, read_failure, waits
from dstrat.launch.job import JOB_VARIABLE, STOP_FILE
from dstrat.launch.nccl_status import read_note, wait_of
from dstrat.launch.progress import RankWatch, descendants_of, launched_file
from dstrat.launch.rank import STACK_SIGNAL, signal_file, stack_file
from dstrat.launch.signals import show_line, stop_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dstrat.launch.elastic import Regrouping
    from dstrat.launch.job import JobSettings, LocalJob
    from dstrat.launch.processes import RankProcess
    from dstrat.launch.signals import Interrupts

_POLL = 0.02  # seconds between two looks
# The peers of a failed rank often notice its end before it has exited itself: it may still be tidying up.
_SETTLE_LOST = 3.0  # seconds
_SETTLE_TIMEOUT = 0.75  # seconds within which ranks time out one after the other
_DUMP = 0.5  # seconds for a rank to write its stack
_REAP = 5.0  # seconds for killed processes to end
_FIRST_PAUSE = 1.0  # seconds between two inspections of ranks that use a processor, at first

_OUR_FOLDER = str(Path(__file__).parent)


class Supervisor:
    """Watches the ranks of this machine from a process that runs no rank, and so outlives any that fails.

    Args:
        processes: The ranks; more may be appended.
        job: The job.
        settings: Has the times within which ranks must end, and come to their launch.
        interrupts: Collects the signals to stop.
        regrouping: Lets ranks go on as fewer ranks when one was killed; None ends all of them.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        job: LocalJob,
        settings: JobSettings,
        interrupts: Interrupts,
        regrouping: Regrouping | None = None,
    ) -> None:
        self.processes, self.interrupts, self._regrouping = processes, interrupts, regrouping
        self.folder, self.world_size = job.folder, job.world_size
        self.grace, self.stop_grace = settings.grace, settings.stop_seconds
        self.ends: dict[int, RankEnd] = {}
        self.stop_signal: signal.Signals | None = None
        self._max_signals = 1  # received here, after which the ranks are ended at once
        self._deadline = float("inf")
        limit = None
        # Ranks of other machines, for which those of this one may wait, are not seen from here.
        if settings.hang_timeout is not None and settings.start_method == "popen" and job.num_nodes == 1:
            limit = settings.hang_timeout.total_seconds()
        self._watch = RankWatch(job.folder, spans_machines=job.num_nodes > 1, limit_before_launch=limit)
        self._idle: dict[int, float] = {}  # limits in seconds of ranks that hang, by rank
        self._before_launch: set[int] = set()  # ranks that run the script, and had not come to their launch then
        self._next_inspection, self._inspection_pause = 0.0, _FIRST_PAUSE
        self._inspected: dict[int, str] = {}  # waits of the last inspection, if all waited

    def run(self) -> None:
        """Wait until all ranks have exited with code 0.

        Raises:
            RankFailedError: A rank failed; all are ended.
            KeyboardInterrupt: The job was stopped by Ctrl-C; all are ended.
            SystemExit: The job was stopped by another signal; all are ended.
        """
        stacks: dict[int, str] = {}
        try:
            # Polled: exit codes, files, signals and idleness have nothing in common to wait for.
            while not self._is_over() or self._regroup():
                self._grow()
                time.sleep(_POLL)
                if self.interrupts.pauses:
                    self._pause()
            if self._failures() or self._idle:
                self._look_for_hung_cleanups()
                stacks = self._stacks_of(self._running())
            elif not self.interrupts.received:
                self._report_external_signals()
        except BaseException as error:
            # From the handler of a signal, such as the time limit of a test, which knows nothing of the ranks.
            self._note_ranks(error)
            raise
        finally:
            self.end_all()
        self._report(stacks)

    def _is_over(self) -> bool:
        self._look()
        self._note_stop()
        if self._all_exited():
            self._look()  # at those that have exited since the first look
            return True
        if self.stop_signal is not None:
            if time.monotonic() > self._deadline:
                self._report_late_ranks(self.stop_signal)
                return True
            # Failures that follow from the stop are normal, such as a connection to a rank that stopped first.
            # No signal ends native code that waits for such a rank, as when a process group opens.
            running = self._running()  # all may have ended since the last look
            return (
                len(self.interrupts.received) >= self._max_signals
                or self._has_cause()
                or (0 < len(running) < len(self.processes) and self._all_wait(running))
            )
        if not self._failures():
            return self._has_hung()
        # The first failure that arrives is often a consequence.
        has_timeout = any(end.failure is not None and end.failure.kind == "timeout" for end in self._failures())
        self._wait_until(
            lambda: self._has_cause() or self._all_exited(), _SETTLE_TIMEOUT if has_timeout else _SETTLE_LOST
        )
        self._look()
        self._note_stop()
        return self.stop_signal is None  # a stop that has arrived meanwhile gives the ranks its longer grace

    # State of the ranks

    def _look(self) -> None:
        """Record the ranks that have ended or written a failure since the last look."""
        for process in self.processes:
            end = self.ends.get(process.rank)
            if end is None or end.exit_code is None:
                self._look_at(process)

    def _look_at(self, process: RankProcess) -> None:
        exit_code = process.poll()  # before the file is read: a process that has ended cannot write it later
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
            was_set_up=stacks.exists() or not self.folder.exists(),  # a removed folder shows nothing
            stack=_read_stack(stacks) if crashed else "",
        )

    def _look_for_hung_cleanups(self) -> None:
        """Record the failures of ranks that have not ended since: they are the cause, and not that the rank hangs."""
        for process in self._running():
            failure = read_failure(self.folder, process.pid, cleans_up=True)
            if failure is not None and process.rank not in self.ends:
                self.ends[process.rank] = RankEnd(
                    rank=process.rank, exit_code=None, failure=failure, time_ns=failure.time_ns
                )

    def _failures(self) -> list[RankEnd]:
        return [end for end in self.ends.values() if end.is_failure and not self._was_requested(end)]

    def _has_cause(self) -> bool:
        self._look()
        return any(end.failure_order == 0 for end in self._failures())

    def _all_exited(self) -> bool:
        return not self._running()

    def _running(self) -> list[RankProcess]:
        return [process for process in self.processes if process.poll() is None]

    def _wait_until(self, is_true: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_true() and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _has_hung(self) -> bool:
        """Record the ranks that are idle for too long, unless another rank is at work."""
        running = self._running()
        limits = self._watch.idle_ranks([process.pid for process in running])
        idle = {process.rank: limits[process.pid] for process in running if process.pid in limits}
        if idle and self._all_wait([process for process in running if process.rank not in idle]):
            self._idle = idle
            self._before_launch = {process.rank for process in running if self._watch.is_before_launch(process.pid)}
        return bool(self._idle)

    def _all_wait(self, busy: list[RankProcess]) -> bool:
        """Return whether ranks that use a processor only wait for peers: on a GPU waiting uses one."""
        if not busy:
            return True
        if time.monotonic() < self._next_inspection:
            return False
        stacks = self._stacks_of(busy)
        before, self._inspected = self._inspected, {}
        if all(waits(stack, is_busy=True) for stack in stacks.values()):
            # A rank at work may have been met in one of its collectives, which will end: it waits if it stays there.
            self._inspected = {rank: wait_of(stack) for rank, stack in stacks.items()}
            if self._inspected == before:
                return True
            self._next_inspection = time.monotonic() + _FIRST_PAUSE
        else:
            self._next_inspection = time.monotonic() + self._inspection_pause
            self._inspection_pause *= 2  # a rank at work is interrupted ever more rarely
        return False

    # Elastic jobs

    def _regroup(self) -> bool:
        """Let the other ranks go on as fewer ranks if one was killed, and return whether they do."""
        regrouping, failures = self._regrouping, self._failures()
        if regrouping is None or not self._only_deaths():
            return False
        error = failure_error(failures, {}, self.world_size)
        if not isinstance(error, RankFailedError) or not regrouping.begin(error, len(self._running())):
            return False
        deadline, buried = time.monotonic() + READY, set[int]()
        while time.monotonic() < deadline and self._only_deaths():
            for process in self.processes:
                if process.rank in self.ends and process.pid not in buried:
                    regrouping.bury(process)
                    buried.add(process.pid)
            if all(map(regrouping.is_ready, self._running())):
                break
            time.sleep(_POLL / 4)
        survivors = self._running()
        if not self._only_deaths() or not survivors or not all(map(regrouping.is_ready, survivors)):
            return False
        ended = [process for process in self.processes if process.rank in self.ends]
        group = regrouping.form_group(survivors, ended, error)
        if group is None:
            return False
        self.processes, self.world_size, self.ends = group, len(group), {}
        self._watch.restart()
        return True

    def _grow(self) -> None:
        """Let new processes take the places of ranks that were killed, once all of them are ready."""
        if self._regrouping is None or self.ends or self.interrupts.received or self.stop_signal is not None:
            return
        group = self._regrouping.grow(self.processes)
        if group is not None:
            self.processes, self.world_size = group, len(group)
            self._watch.restart()

    def _only_deaths(self) -> bool:
        """Return whether signals have ended ranks, and nothing else has happened."""
        self._look()
        is_stopped = self.interrupts.received or self.stop_signal is not None or self._idle
        return bool(self.ends) and not is_stopped and all(end.was_killed for end in self.ends.values())

    # Stop signals

    def _note_stop(self) -> None:
        """Begin to stop when a signal arrives here, or when ranks have stopped on one that they received directly."""
        if self.stop_signal is not None:
            return
        if self.interrupts.received:
            self.stop_signal = self.interrupts.received[0]
            self._max_signals = 2  # this one, and the second that ends the ranks at once
            for process in self._running():
                # An interrupt of imports may be swallowed, or become another error, and there is nothing to save yet.
                if not launched_file(self.folder, process.pid).exists():
                    _send(signal.SIGTERM, [process.pid])
                # Not to ranks that systemd or scancel --full has signalled: a second signal would end them at once.
                elif not signal_file(self.folder, process.pid).exists():
                    _send(self.stop_signal, [process.pid])
            show_line(f"{self.stop_signal.name}: all ranks stop at the next step; a second one ends them at once")
        else:
            self.stop_signal = next(filter(None, map(_stopped_by, self.ends.values())), None)
            if self.stop_signal is not None:
                self._report_exit_codes(self.stop_signal)
        if self.stop_signal is not None:
            self._deadline = time.monotonic() + self.stop_grace
            # For ranks that still wait for peers to start, which may have stopped already.
            with contextlib.suppress(OSError):
                (self.folder / STOP_FILE).write_text(str(int(self.stop_signal)))

    def _report_late_ranks(self, number: signal.Signals) -> None:
        late = [process.rank for process in self._running()]
        show_line(
            f"{number.name}: {list_ranks(late)} of {self.world_size} did not stop within {self.stop_grace:g} s, and "
            f"{'are' if len(late) > 1 else 'is'} ended: a checkpoint that was to be saved is not complete"
        )

    def _report_external_signals(self) -> None:
        """Print which ranks received a stop signal from outside of the job, which made all ranks stop."""
        files = {process.rank: signal_file(self.folder, process.pid) for process in self.processes}
        signals = {rank: signal.Signals(int(file.read_text())) for rank, file in files.items() if file.exists()}
        if signals:
            show_line(
                f"{next(iter(signals.values())).name}: {list_ranks([*signals])} of {self.world_size} received it from "
                "outside of this job, and all ranks have stopped after the same step"
            )

    def _report_exit_codes(self, number: signal.Signals) -> None:
        """Print which ranks exited with a signal's code, unless they have recorded that they received it."""
        if not any(signal_file(self.folder, process.pid).exists() for process in self.processes):
            ranks = list_ranks([end.rank for end in self.ends.values() if _stopped_by(end) == number])
            show_line(
                f"{ranks} of {self.world_size} exited with code {128 + number}, as after {number.name}: all ranks have "
                "to stop"
            )

    def _pause(self) -> None:
        """Stop all ranks and this process on Ctrl-Z, until the shell continues this process."""
        self._send_to_groups(signal.SIGSTOP)  # SIGTSTP has no effect in orphaned process groups
        self.interrupts.pauses = False
        # By the default handler, which has no effect where no shell could continue this process.
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._send_to_groups(signal.SIGCONT)
        self._watch.restart()  # the pause is no idleness

    def _was_requested(self, end: RankEnd) -> bool:
        """Return whether a rank ended because of a stop signal."""
        killed = self.stop_signal is not None and end.exit_code in (-self.stop_signal, -signal.SIGTERM)
        return killed or _stopped_by(end) is not None

    # End of the ranks

    def _stacks_of(self, processes: Iterable[RankProcess]) -> dict[int, str]:
        """Return the stacks of ranks that have neither ended nor failed, by rank."""
        silent = [process for process in processes if process.rank not in self.ends]
        files = {process.rank: stack_file(self.folder, process.pid) for process in silent}
        ready = [process for process in silent if files[process.rank].exists()]
        for process in ready:
            with contextlib.suppress(FileNotFoundError):  # the job's folder was removed
                os.truncate(files[process.rank], 0)  # of an earlier inspection
        _send(STACK_SIGNAL, [process.pid for process in ready])
        self._wait_until(lambda: all(map(_read_stack, files.values())), _DUMP)
        time.sleep(_POLL)  # the last one may still be writing
        notes = {process.rank: read_note(self.folder, process.pid) for process in silent}
        return {rank: "\n".join(filter(None, [_read_stack(file), notes[rank]])) for rank, file in files.items()}

    def end_all(self) -> None:
        """End every rank and its descendants: SIGTERM, a grace period, SIGKILL."""
        if self._regrouping is not None:
            self._regrouping.dismiss()
        failed = bool(self._running()) or any(end.is_failure for end in self.ends.values())
        # Looked for now and after the ranks: a child whose parent has ended is no longer found by its parent.
        strays = self._strays() if failed else set()
        # A rank that has written its failure is on its way out, and SIGTERM would cut its tidying up short.
        _send(signal.SIGTERM, [process.pid for process in self._running() if process.rank not in self.ends])
        self._wait_until(self._all_exited, self.grace)
        self._send_to_groups(signal.SIGKILL)  # also of ranks that have ended, whose workers may live on
        if failed and (strays := _alive(strays | self._strays())):
            _send(signal.SIGTERM, strays)  # after the ranks, which may need them to shut down
            self._wait_until(lambda: not _alive(strays), self.grace)
            _send(signal.SIGKILL, strays)
        # A rank that had not yet created its process group.
        _send(signal.SIGKILL, [process.pid for process in self._running()])
        self._wait_until(self._all_exited, _REAP)

    def _strays(self) -> set[int]:
        """Return the descendants of the ranks outside of their process groups, by parent or by environment."""
        # By environment too: a daemon's parent is init, and a killed rank has no children any more.
        mark = f"{JOB_VARIABLE}={self.folder}".encode()
        groups = {process.pid for process in self.processes}
        strays = set(descendants_of(process.pid for process in self._running()))
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended, or another user's
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    strays.add(int(entry.name))
        return {pid for pid in strays - groups if _group_of(pid) not in groups}

    def _send_to_groups(self, number: signal.Signals) -> None:
        """Send a signal to the process groups of ranks and newcomers."""
        newcomers = [] if self._regrouping is None else self._regrouping.newcomers
        for process in (*self.processes, *newcomers):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    # Report

    def _note_ranks(self, error: BaseException) -> None:
        """Add to an error that ends the job from outside where its running ranks were."""
        running = self._running()
        if sys.version_info >= (3, 11) and running:
            error.add_note("\n\n".join(describe_stacks(self._stacks_of(running))))

    def _folder_error(self, error: LaunchError) -> LaunchError:
        message = (
            f"{error}\n(the job's folder {str(self.folder)!r} was removed while the job ran, so that ranks could not "
            "write their errors to it; see above: keep cleaners of temporary files away from dstrat-job-*)"
        )
        if isinstance(error, RankFailedError):
            return RankFailedError(message, rank=error.rank, exit_code=error.exit_code, summary=error.summary)
        return type(error)(message)

    def _report(self, stacks: dict[int, str]) -> None:
        """Raise the error, interrupt or exit of the job; nothing if all ranks have exited with code 0."""
        if len(self.ends) == len(self.processes) and not any(end.is_failure for end in self.ends.values()):
            return
        error: LaunchError | None = None
        failures = self._failures()
        if self._idle and not failures:
            error = hang_error(self._idle, stacks, self.world_size, before_launch=self._before_launch)
        if failures:
            well = [end for end in self.ends.values() if not end.is_failure]
            error = failure_error([*failures, *well], stacks, self.world_size)
        if self.stop_signal is None and error is not None:
            raise error if self.folder.exists() else self._folder_error(error)
        # A stopped job ends as a stopped program does, and shows a failure besides, such as of saving a checkpoint.
        cause = error if any(end.failure_order == 0 for end in failures) else None
        if self.stop_signal in (signal.SIGINT, None):
            raise KeyboardInterrupt from cause
        raise SystemExit(128 + self.stop_signal) from cause


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _alive(pids: Iterable[int]) -> set[int]:
    return {pid for pid in pids if _group_of(pid) is not None}


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _stopped_by(end: RankEnd) -> signal.Signals | None:
    """Return the signal on which a rank stopped, which its exit code shows as in shells (128 + number)."""
    if end.failure is not None or end.exit_code is None:
        return None
    return next((number for number in stop_signals(includes_preemption=True) if end.exit_code == 128 + number), None)


def _read_stack(file: Path) -> str:
    """Return the stacks in a file, without the launcher's threads and outermost frames."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    threads = [lines for thread in text.split("\n\n") if (lines := _users_frames(thread.strip("\n").splitlines()))]
    return "\n\n".join("\n".join(lines) for lines in threads)


def _users_frames(thread: list[str]) -> list[str]:
    """Return the lines of a thread's stack without the launcher's outermost frames; empty where it has no others."""
    forked = next((index for index, line in enumerate(thread) if line.endswith(" in _run_forked")), len(thread))
    frames = thread[1:forked]  # the frames from there on belong to the process that was forked
    while frames and (_OUR_FOLDER in frames[-1] or threading.__file__ in frames[-1]):
        frames.pop()
    return [*thread[:1], *frames] if frames or len(thread) == 1 else []
