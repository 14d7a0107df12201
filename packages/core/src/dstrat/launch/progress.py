"""Hang detection: a job ends when its ranks make no progress and none of them is at work.

A rank *beats* whenever all ranks have agreed on something between batches, about twice a second.  It is *silent* where
it has not beaten since the last look, and *idle* where it has neither used a processor nor read, written or sent
anything since.  A job *hangs* when a rank has been idle for the limit, and each other rank is idle too or waits for
others in a collective.  So a rank that computes or loads data may take as long as it likes, whatever others do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta

    from dstrat.launch.peer_watch import PeerWatch

_IDLE_SHARE = 0.05  # of one processor; the threads of 24 Gloo groups that wait take 0.03
_IDLE_RATE = 50_000  # bytes in a second of files; a progress bar that is redrawn writes a thousand
_IDLE_NETWORK_RATE = 500_000  # bytes in a second of the machine, on which others may chat
MARGIN = 1.0  # seconds; a collective of others that ends by the same timeout says more
_PATIENCE = 5.0  # seconds that a waiting rank leaves to the one that it waits for, so that this one is named
PAUSE = 5.0  # seconds between two looks after which the watcher itself was stopped: a frozen container, Ctrl-Z

_beats: list[Callable[[], None]] = []  # of the run in this process, if it is watched


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a process and those that it has started have done until now.

    Attributes:
        time: When this was read, in seconds of the monotonic clock.
        seconds: Of processors, used or waited for: on a machine that has too much to do, work is no idleness.
        num_bytes: Read from files and written to them; sockets are not among these.
        num_network_bytes: Received and sent by the whole machine, but for the loopback.
    """

    time: float
    seconds: float
    num_bytes: int
    num_network_bytes: int

    def is_idle_since(self, before: Activity) -> bool:
        """Return whether next to nothing was done between two readings."""
        duration = self.time - before.time
        # Both may have become less, where a process has ended: that is something too.
        return (
            abs(self.seconds - before.seconds) < _IDLE_SHARE * duration
            and abs(self.num_bytes - before.num_bytes) < _IDLE_RATE * duration
            and abs(self.num_network_bytes - before.num_network_bytes) < _IDLE_NETWORK_RATE * duration
        )


def read_activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Return the activity of processes by process id; nothing of those that it cannot be known of (macOS, debugged)."""
    children, seconds = _read_processes()
    families = {pid: [pid, *_descendants(pid, children)] for pid in pids if pid in seconds and _can_be_watched(pid)}
    return {pid: _sum(family, seconds) for pid, family in families.items()}


def read_activity_of_this_process() -> Activity | None:
    """Return the activity of this process but for the calling thread, which only looks."""
    children, seconds = _read_processes()
    pid = os.getpid()
    if pid not in seconds or not _can_be_watched(pid):
        return None
    others = _sum(_descendants(pid, children), seconds)
    this_thread = f"/proc/{pid}/task/{threading.get_native_id()}"
    delay = _seconds_waited_for_processors(pid) - _delay_of(this_thread)
    return replace(
        others,
        seconds=others.seconds + delay + time.process_time() - time.thread_time(),
        num_bytes=others.num_bytes + _bytes_of(f"/proc/{pid}") - _bytes_of(this_thread),
    )


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Return the processes that others have started, and those that these have."""
    children, _ = _read_processes()
    return [descendant for pid in pids for descendant in _descendants(pid, children)]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also where its parent has not taken note of that yet."""
    if state := _read_stat(str(pid))[:1]:
        return state[0] in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return False


def _read(path: str) -> bytes:
    """Return a file of the system; nothing where it is not there (any more), or not for this user."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - of which hundreds are read at a time
            return file.read()
    except OSError:
        return b""


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - names of hundreds of numbers
    except OSError:
        return []


def _read_processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the children of all processes and their seconds of processors, by process id."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for name in filter(str.isdigit, _list("/proc")):
        if fields := _read_stat(name):
            children.setdefault(int(fields[1]), []).append(int(name))
            seconds[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return children, seconds


def _read_stat(pid: str) -> list[bytes]:
    """Return what the system has of a process, from its state on (proc(5)); nothing where there is none."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # before is its program's name, with any bytes


def _can_be_watched(pid: int) -> bool:
    """Return whether a process has counts of what it reads, and is not stopped by a debugger."""
    is_traced = re.search(rb"TracerPid:\s*[1-9]", _read(f"/proc/{pid}/status"))
    return bool(_read(f"/proc/{pid}/io")) and not is_traced


def _descendants(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    descendants = list(children.get(pid, []))
    for descendant in descendants:  # grows while it is walked
        descendants += children.get(descendant, [])
    return descendants


def _sum(family: list[int], seconds: Mapping[int, float]) -> Activity:
    return Activity(
        time=time.monotonic(),
        seconds=sum(seconds.get(pid, 0.0) + _seconds_waited_for_processors(pid) for pid in family),
        num_bytes=sum(_bytes_of(f"/proc/{pid}") for pid in family),
        num_network_bytes=_network_bytes(),
    )


def _seconds_waited_for_processors(pid: int) -> float:
    return sum(_delay_of(f"/proc/{pid}/task/{thread}") for thread in _list(f"/proc/{pid}/task"))


def _delay_of(thread: str) -> float:
    fields = _read(f"{thread}/schedstat").split()  # nothing where the kernel does not count
    return int(fields[1]) / 1e9 if fields else 0.0  # nanoseconds on a run queue


def _bytes_of(process: str) -> int:
    counted = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")  # the last two have what goes through mapped files
    lines = _read(f"{process}/io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(counted))


def _network_bytes() -> int:
    interfaces = [line.partition(b":") for line in _read("/proc/net/dev").splitlines() if b":" in line]
    counts = [numbers.split() for name, _, numbers in interfaces if name.strip() != b"lo"]
    return sum(int(numbers[0]) + int(numbers[8]) for numbers in counts)  # received and sent


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
        self._previous: Activity | None = None
        self._since = 0.0

    def update(self, activity: Activity | None) -> float:
        """Take one more reading of the process's activity, and return for how many seconds it has been idle."""
        previous, self._previous = self._previous, activity
        if activity is None:  # nobody can say
            return 0.0
        longest_pause = 2 * self.period + PAUSE
        if previous is None or activity.time - previous.time > longest_pause or not activity.is_idle_since(previous):
            self._since = activity.time
        return activity.time - self._since


def beat() -> None:
    """Note progress of the run in this process; costs next to nothing where nobody watches it."""
    for note in _beats:
        note()


@contextlib.contextmanager
def watched_for_hangs(
    limit: timedelta | None, *, longest: timedelta | None, rank: int, local_rank: int, size: int
) -> Iterator[None]:
    """Let this rank's part of a job end when it hangs in a ``with`` block.

    The supervisor watches ranks that it has started; others watch each other.

    Args:
        limit: How long it may be idle without progress; None is as long as it likes.
        longest: How long a collective waits for other ranks.
        rank: Its global rank.
        local_rank: Its rank on its machine.
        size: Number of ranks.
    """
    if limit is None or size == 1:
        yield
        return
    from dstrat.launch.rank import this_rank  # not needed by runs of one process

    started = this_rank()
    limits = (limit.total_seconds(), max(limit, longest or limit).total_seconds())
    watch: _ProgressFile | PeerWatch
    if started is not None:
        watch = _ProgressFile(progress_file(started.folder, os.getpid()), *limits)
    else:
        from dstrat.launch.peer_watch import PeerWatch  # which needs this module

        watch = PeerWatch(*limits, rank=rank, local_rank=local_rank, size=size)
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

    def __init__(self, path: Path, limit: float, longest: float) -> None:
        self._path = path
        with contextlib.suppress(OSError):  # the folder may have been removed
            unfinished = path.with_suffix(".unfinished")
            unfinished.write_text(f"{limit} {longest}")
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
        spans_machines: Whether the job has ranks that cannot be seen from here, and that may be at work.
    """

    def __init__(self, folder: Path, *, spans_machines: bool) -> None:
        self._folder = folder
        self._spans_machines = spans_machines
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
        idle = {pid: self._timers[pid].update(activities.get(pid)) for pid in silent}
        return {pid: self._timers[pid].limit for pid in silent if idle[pid] > self._timers[pid].limit + MARGIN}

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
                limit, longest = map(float, path.read_text().split())
                self._timers[pid] = IdleTimer(longest + _PATIENCE if self._spans_machines else limit)
        except OSError:  # it is in no run
            self._timers.pop(pid, None)
            return False
        if self._beats.get(pid) != time_ns:
            self._beats[pid] = time_ns
            self._timers[pid].restart()
            return False
        return True


def waits_for_others(innermost_files: Iterable[str], *, is_busy: bool = False) -> bool:
    """Return whether a rank waits for others in a collective.

    Args:
        innermost_files: The files of its main thread's frames, the innermost first.
        is_busy: Whether it uses a processor; then a backward pass is no sign of waiting.
    """
    folders = _waiting_folders()
    if is_busy:
        folders = tuple(folder for folder in folders if "autograd" not in folder)
    return any(file.startswith(folders) for file in islice(innermost_files, _INNERMOST))


_INNERMOST = 3  # frames: torch's logger of collectives and our reduction may stand between


@cache
def _waiting_folders() -> tuple[str, ...]:
    """Return the beginnings of paths of what waits for others."""
    torch = importlib.util.find_spec("torch")  # does not import it
    assert torch is not None  # noqa: S101 - core requires it
    assert torch.origin is not None  # noqa: S101 - likewise
    ours, theirs = Path(__file__).parents[1], Path(torch.origin).parent
    folders = [theirs / "distributed", theirs / "autograd", ours / "parallel"]
    # On a GPU a collective returns at once, and who reads its result waits.
    return (
        *(os.path.join(folder, "") for folder in folders),  # noqa: PTH118 - the end of a folder's name
        *map(str, (ours / "interfaces" / "strategy.py", ours / "training" / "loops" / "votes.py")),
    )
