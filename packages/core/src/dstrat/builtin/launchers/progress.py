"""Hang detection: ranks note their progress, and one that makes none and is idle ends the job.

A rank notes a beat whenever all ranks have agreed on something between batches, about twice a second.  Between beats
it may work for as long as it likes: what uses a processor, reads or writes is no hang.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta

_IDLE_SHARE = 0.02  # of one processor; threads that only look at something now and then take less
_IDLE_RATE = 50_000  # bytes in a second; a progress bar that is redrawn writes a thousand
_MARGIN = 1.0  # seconds
_PATIENCE = 5.0  # seconds that a waiting rank leaves to the one that it waits for, so that this one is named

_beats: list[Callable[[], None]] = []  # of the run in this process, if it is watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a process and those that it has started have done until now.

    Attributes:
        time: When this was read, in seconds of the monotonic clock.
        seconds: Of processors, used or waited for: on a machine that has too much to do, work is no idleness.
        num_bytes: Read and written.
    """

    time: float
    seconds: float
    num_bytes: int

    def is_idle_since(self, before: Activity) -> bool:
        """Return whether next to nothing was done between two readings."""
        duration = self.time - before.time
        # Both may have become less, where a process has ended: that is something too.
        return (
            abs(self.seconds - before.seconds) < _IDLE_SHARE * duration
            and abs(self.num_bytes - before.num_bytes) < _IDLE_RATE * duration
        )


def read_activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Return the activity of processes that run, by process id; nothing where the system does not tell (macOS)."""
    children, seconds = _read_processes()
    families = {pid: [pid, *_descendants(pid, children)] for pid in pids if pid in seconds}
    return {pid: _sum(family, seconds) for pid, family in families.items()}


def read_own_activity() -> Activity | None:
    """Return the activity of this process but for the calling thread, which only looks."""
    children, seconds = _read_processes()
    if os.getpid() not in seconds:
        return None
    others = _sum(_descendants(os.getpid(), children), seconds)
    this_thread = f"{os.getpid()}/task/{threading.get_native_id()}"
    delay = _seconds_waited_for_processors(os.getpid()) - _delay_of(Path(f"/proc/{this_thread}"))
    return Activity(
        time=others.time,
        seconds=others.seconds + delay + time.process_time() - time.thread_time(),
        num_bytes=others.num_bytes + _bytes_of(os.getpid()) - _bytes_of(this_thread),
    )


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Return the processes that others have started, and those that these have."""
    children, _ = _read_processes()
    return [descendant for pid in pids for descendant in _descendants(pid, children)]


def _read_processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the children of all processes and their seconds of processors, by process id."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = entry.read_text().rpartition(")")[2].split()  # from the state on, see proc(5)
            pid = int(entry.parent.name)
            children.setdefault(int(fields[1]), []).append(pid)
            seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return children, seconds


def _descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    found = list(children.get(pid, []))
    for member in found:  # grows while it is walked
        found += children.get(member, [])
    return found


def _sum(family: list[int], seconds: Mapping[int, float]) -> Activity:
    total = sum(seconds.get(pid, 0.0) + _seconds_waited_for_processors(pid) for pid in family)
    return Activity(time=time.monotonic(), seconds=total, num_bytes=sum(map(_bytes_of, family)))


def _seconds_waited_for_processors(pid: int) -> float:
    return sum(map(_delay_of, Path(f"/proc/{pid}/task").glob("*")))


def _delay_of(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[1]) / 1e9  # nanoseconds on a run queue
    except (OSError, IndexError):  # it has ended, or the kernel does not count
        return 0.0


def _bytes_of(process: int | str) -> int:
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()
    except OSError:
        return 0
    counted = ("rchar", "wchar", "read_bytes")  # the last has what is read through mapped files
    return sum(int(line.split()[1]) for line in lines if line.startswith(counted))


class IdleTimer:
    """The time since a process has last shown that it does not hang.

    Args:
        limit: Seconds after which it is taken to hang.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.period = min(max(limit / 10, 0.25), 30.0)
        self.restart()

    def restart(self) -> None:
        """Begin anew, as after the process was stopped and continued."""
        self._since = time.monotonic()
        self._activity: Activity | None = None

    def idle_seconds(self, activity: Activity | None) -> float:
        """Return for how long the process has been idle, after one more reading of its activity."""
        if activity is None:  # nobody can say
            self.restart()
        elif self._activity is not None and not activity.is_idle_since(self._activity):
            self._since = activity.time
        self._activity = activity
        return time.monotonic() - self._since


def beat() -> None:
    """Note progress of the run in this process; costs next to nothing where nobody watches it."""
    for note in _beats:
        note()


@contextlib.contextmanager
def watched_for_hangs(limit: timedelta | None, *, longest: timedelta | None, rank: int, size: int) -> Iterator[None]:
    """Let this rank's part of a job end when it hangs in a ``with`` block.

    The supervisor watches a rank that it has started; another rank watches itself.

    Args:
        limit: How long it may be idle without progress; None is as long as it likes.
        longest: How long a collective waits for other ranks.
        rank: Its global rank.
        size: Number of ranks.
    """
    if limit is None or size == 1:
        yield
        return
    from dstrat.builtin.launchers.rank import this_rank  # not needed by runs of one process

    started = this_rank()
    watch: _ProgressFile | _OwnWatch
    if started is not None:
        # A collective of others that ends by the same timeout says more.
        watch = _ProgressFile(progress_file(started.folder, os.getpid()), limit.total_seconds() + _MARGIN)
    else:
        watch = _OwnWatch(limit.total_seconds(), max(limit, longest or limit).total_seconds(), f"rank {rank} of {size}")
    _beats.append(watch.beat)
    try:
        yield
    finally:
        _beats.remove(watch.beat)
        watch.close()


def progress_file(folder: Path, pid: int) -> Path:
    """Return where a rank notes its progress; the file is there while a run is watched, and has its limit."""
    return folder / f"progress-{pid}"


class _ProgressFile:
    """The progress of a rank that dstrat has started: the file's time is that of the last beat."""

    def __init__(self, path: Path, limit: float) -> None:
        self._path = path
        with contextlib.suppress(OSError):  # the folder may have been removed
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(repr(limit))
            unfinished.replace(path)

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


class RankWatch:
    """The supervisor's view of the progress of its ranks.

    Args:
        folder: The job's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._timers: dict[int, IdleTimer] = {}
        self._beats: dict[int, int] = {}
        self._next_look = 0.0

    def idle_ranks(self, pids: Iterable[int]) -> dict[int, float]:
        """Return the processes that have been idle for longer than their limit, with that limit.

        Args:
            pids: The ranks that run.
        """
        now = time.monotonic()
        if now < self._next_look:
            return {}
        silent = [pid for pid in pids if self._is_silent(pid)]
        self._next_look = now + min((self._timers[pid].period for pid in silent), default=0.5)
        activities = read_activities(silent) if silent else {}
        idle = {pid: self._timers[pid].idle_seconds(activities.get(pid)) for pid in silent}
        return {pid: self._timers[pid].limit for pid in silent if idle[pid] > self._timers[pid].limit}

    def restart(self) -> None:
        """Begin anew, after all ranks were stopped and continued."""
        for timer in self._timers.values():
            timer.restart()

    def _is_silent(self, pid: int) -> bool:
        """Return whether a rank is in a run that is watched, and has not noted a beat since the last look."""
        path = progress_file(self._folder, pid)
        try:
            time_ns = path.stat().st_mtime_ns
            if pid not in self._timers:
                self._timers[pid] = IdleTimer(float(path.read_text()))
        except OSError:  # it is in no run
            self._timers.pop(pid, None)
            return False
        if self._beats.get(pid) != time_ns:
            self._beats[pid] = time_ns
            self._timers[pid].restart()
            return False
        return True


class _OwnWatch(threading.Thread):
    """A rank's watch over itself, where nothing of dstrat's watches it: under torchrun or a scheduler.

    It works as long as other threads of the rank can run, which native code may prevent.

    Args:
        limit: Seconds of idleness after which it ends a rank that waits for no other.
        longest: The same for one that waits for others.
        name: The rank, in words.
    """

    def __init__(self, limit: float, longest: float, name: str) -> None:
        super().__init__(name="dstrat-hang-watch", daemon=True)
        self._timer, self._longest, self._rank = IdleTimer(limit), longest + _PATIENCE, name
        self._main = threading.get_ident()
        self._closed = threading.Event()
        self._has_beaten = False
        self.start()

    def beat(self) -> None:
        self._has_beaten = True

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        while not self._closed.wait(self._timer.period):
            if self._has_beaten:
                self._has_beaten = False
                self._timer.restart()
                continue
            idle = self._timer.idle_seconds(read_own_activity())
            if idle > self._timer.limit and (idle > self._longest or not self._waits()):
                self._end(idle)

    def _stack(self) -> list[traceback.FrameSummary]:
        return traceback.extract_stack(sys._current_frames()[self._main])  # noqa: SLF001 - there is no other way

    def _waits(self) -> bool:
        return waits_for_others(self._stack()[-1].filename)

    def _end(self, idle: float) -> None:
        doing = "waits for others that do not come" if self._waits() else "is not where the others wait for it"
        stack = "".join(traceback.format_list(self._stack()))
        message = f"{self._rank} hung: it has done nothing for {idle:.0f} s, and {doing}. Its stack:\n\n{stack}"
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(TimeoutError(message))
        os._exit(1)


def waits_for_others(innermost: str) -> bool:
    """Return whether a rank waits in communication, by the innermost frame of its main thread.

    Args:
        innermost: The frame's file, or a line of text with it.
    """
    folders = (("torch", "distributed"), ("torch", "autograd"), ("dstrat", "parallel"))
    return any(os.path.join(*folder, "") in innermost for folder in folders)  # noqa: PTH118 - a part of a text
