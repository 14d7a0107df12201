"""Hang detection: a job ends when its ranks make no progress and none of them is at work.

A rank *beats* whenever all ranks have agreed on something between batches, about twice a second.  It is *silent* if
it has not beaten since the last look, and *idle* if it has neither used a processor nor read, written or sent
anything since.  A job *hangs* when a rank has been idle for the limit, and each other rank is idle too or waits in a
collective.  So a rank that computes or loads data may take any time.
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

from dstrat.launch.nccl_status import CollectivesNotes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.launch.peer_watch import PeerWatch

_IDLE_SHARE = 0.05  # of one processor; the threads of 24 Gloo groups that wait take 0.03
# Of one processor, with the time that threads wait for one.  On an overloaded machine a rank at work waits most of the
# time, and one that sleeps waits too: a thread of Gloo wakes up a hundred times in a second.
_IDLE_DEMAND = 0.5
_IDLE_RATE = 50_000  # bytes in a second of files; a progress bar that is redrawn writes a thousand
_IDLE_NETWORK_RATE = 500_000  # bytes in a second of the machine, which other jobs use too
_NETWORK_SHARE = 0.002  # of one processor, which a process uses at least while it receives at that rate
MARGIN = 1.0  # seconds; a peer's collective that ends by the same timeout reports more
_PATIENCE = 5.0  # seconds that a rank in a collective waits longer than the hung one, so that the hung one is named
PAUSE = 5.0  # seconds between two looks after which the watcher itself was stopped: a frozen container, Ctrl-Z


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Resources that a process and its descendants have used until now.

    Attributes:
        time: When this was read, in seconds of the monotonic clock.
        seconds: Processor time.
        seconds_waited: Time that its threads waited for a processor, on a machine with more work than processors.
        num_bytes: Bytes read from files and written to them, without sockets.
        num_network_bytes: Bytes received and sent by the machine, without the loopback.
    """

    time: float
    seconds: float
    seconds_waited: float
    num_bytes: int
    num_network_bytes: int

    def is_idle_since(self, before: Activity) -> bool:
        """Return whether the process was idle between two readings."""
        duration = self.time - before.time
        # They shrink when a descendant ends; that is activity too.
        seconds, num_bytes = abs(self.seconds - before.seconds), abs(self.num_bytes - before.num_bytes)
        demand = seconds + abs(self.seconds_waited - before.seconds_waited)
        num_network_bytes = abs(self.num_network_bytes - before.num_network_bytes)
        # On a machine with other jobs the network is always busy, also for a process that sleeps.
        uses_network = num_network_bytes >= _IDLE_NETWORK_RATE * duration and seconds >= _NETWORK_SHARE * duration
        uses_processor = seconds >= _IDLE_SHARE * duration or demand >= _IDLE_DEMAND * duration
        return not uses_processor and num_bytes < _IDLE_RATE * duration and not uses_network


def read_activities(pids: Iterable[int]) -> dict[int, Activity]:
    """Return the activity of processes by process id, without those that hide it (on macOS, or in a debugger)."""
    children, seconds = _read_processes()
    families = {pid: [pid, *_descendants(pid, children)] for pid in pids if pid in seconds and _can_be_watched(pid)}
    return {pid: _sum(family, seconds) for pid, family in families.items()}


def read_activity_of_this_process() -> Activity | None:
    """Return the activity of this process without the calling thread, which is the watch itself."""
    children, seconds = _read_processes()
    pid = os.getpid()
    if pid not in seconds or not _can_be_watched(pid):
        return None
    descendants = _sum(_descendants(pid, children), seconds)
    this_thread = f"/proc/{pid}/task/{threading.get_native_id()}"
    waited = _seconds_waited_for_processors(pid) - _delay_of(this_thread)
    return replace(
        descendants,
        # process_time has nanoseconds, and /proc/PID/stat has ticks of 10 ms.
        seconds=descendants.seconds + time.process_time() - time.thread_time(),
        seconds_waited=descendants.seconds_waited + waited,
        num_bytes=descendants.num_bytes + _bytes_of(f"/proc/{pid}") - _bytes_of(this_thread),
    )


def descendants_of(pids: Iterable[int]) -> list[int]:
    """Return the children of processes, their children, and so on."""
    children, _ = _read_processes()
    return [descendant for pid in pids for descendant in _descendants(pid, children)]


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not yet reaped it."""
    if state := _read_stat(str(pid))[:1]:
        return state[0] in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is another user's
        return False
    return False


def start_of(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None where the system does not tell."""
    fields = _read_stat(str(pid))
    return int(fields[19]) if fields else None


def _read(path: str) -> bytes:
    """Return the content of a system file; empty where it is missing or this user may not read it."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - hundreds are read at a time, and Path is slower
            return file.read()
    except OSError:
        return b""


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - hundreds of entries, and Path is slower
    except OSError:
        return []


def _read_processes() -> tuple[dict[int, list[int]], dict[int, float]]:
    """Return the children and the processor seconds of all processes, by process id."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for name in filter(str.isdigit, _list("/proc")):
        if fields := _read_stat(name):
            children.setdefault(int(fields[1]), []).append(int(name))
            seconds[int(name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return children, seconds


def _read_stat(pid: str) -> list[bytes]:
    """Return the fields of a process from its state on, see proc(5); empty where there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()  # the program's name before may have any bytes


def _can_be_watched(pid: int) -> bool:
    """Return whether the system counts the bytes that a process reads, and no debugger stops it."""
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
        seconds=sum(seconds.get(pid, 0.0) for pid in family),
        seconds_waited=sum(map(_seconds_waited_for_processors, family)),
        num_bytes=sum(_bytes_of(f"/proc/{pid}") for pid in family),
        num_network_bytes=_network_bytes(),
    )


def _seconds_waited_for_processors(pid: int) -> float:
    return sum(_delay_of(f"/proc/{pid}/task/{thread}") for thread in _list(f"/proc/{pid}/task"))


def _delay_of(thread: str) -> float:
    fields = _read(f"{thread}/schedstat").split()  # nothing where the kernel does not count
    return int(fields[1]) / 1e9 if fields else 0.0  # nanoseconds on a run queue


def _bytes_of(process: str) -> int:
    counted = (b"rchar", b"wchar", b"read_bytes", b"write_bytes")  # the last two count mapped files too
    lines = _read(f"{process}/io").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(counted))


def _network_bytes() -> int:
    interfaces = [line.partition(b":") for line in _read("/proc/net/dev").splitlines() if b":" in line]
    counts = [numbers.split() for name, _, numbers in interfaces if name.strip() != b"lo"]
    return sum(int(numbers[0]) + int(numbers[8]) for numbers in counts)  # received and sent


class IdleTimer:
    """Timer of a process's idleness.

    Args:
        limit: Seconds of idleness after which the process hangs.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.period = min(max(limit / 10, 0.25), 30.0)  # seconds between two readings
        self.restart()

    def restart(self) -> None:
        """Restart at 0, as after the process was stopped and continued."""
        self._previous: Activity | None = None
        self._since = 0.0

    def update(self, activity: Activity | None) -> float:
        """Record a reading of the process's activity, and return for how many seconds it has been idle."""
        previous, self._previous = self._previous, activity
        if activity is None:  # unreadable: never idle, as ending a rank at work is worse than waiting for a hung one
            return 0.0
        longest_pause = 2 * self.period + PAUSE
        if previous is None or activity.time - previous.time > longest_pause or not activity.is_idle_since(previous):
            self._since = activity.time
        return activity.time - self._since


@contextlib.contextmanager
def watched_for_hangs(strategy: Strategy) -> Iterator[Callable[[], None] | None]:
    """Watch for hangs of the job within a ``with`` block, and end it then.

    The supervisor watches the ranks that it has started; other ranks watch each other.  The block gets a function that
    notes progress of the run; None where nothing is watched.

    Args:
        strategy: Has the limits and the ranks of the job.
    """
    limit = strategy.hang_timeout
    if limit is None or strategy.world_size == 1:
        yield None
        return
    import torch.distributed  # only runs of several processes need it, and the supervisor imports this module

    from dstrat.launch.failures import forget_failure
    from dstrat.launch.rank import this_rank

    started = this_rank()
    if started is not None:
        forget_failure(started.folder)  # the program has caught that error
    # A rank that sees no peers waits for as long as they may be in a collective, and never less than the limit.
    limits = (limit.total_seconds(), max(limit, strategy.timeout or limit).total_seconds())
    watch: _ProgressFile | PeerWatch
    if started is not None:
        watch = _ProgressFile(progress_file(started.folder, os.getpid()), *limits)
    else:
        from dstrat.launch.peer_watch import PeerWatch  # which needs this module

        watch = PeerWatch(*limits, rank=strategy.global_rank, local_rank=strategy.local_rank, size=strategy.world_size)
    notes = None
    if started is not None and torch.distributed.is_nccl_available():
        notes = CollectivesNotes(started.folder, os.getpid())
    try:
        yield watch.beat
    finally:
        if notes is not None:
            notes.close()
        watch.close()


def progress_file(folder: Path, pid: int) -> Path:
    """Return the path of a rank's progress file, which exists while a run is watched and holds its limits."""
    return folder / f"progress-{pid}"


def launched_file(folder: Path, pid: int) -> Path:
    """Return the path of a file that exists once a rank has come to the launch that it is for."""
    return folder / f"launched-{pid}"


class _ProgressFile:
    """File of a rank that dstrat has started, whose modification time is that of the last beat."""

    def __init__(self, path: Path, limit: float, longest: float) -> None:
        self._path = path
        with contextlib.suppress(OSError):  # the folder may have been removed
            unfinished = path.with_suffix(".unfinished")  # the supervisor may read it meanwhile
            unfinished.write_text(f"{limit} {longest}")
            unfinished.replace(path)

    def beat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()


class RankWatch:
    """Watch of the supervisor over the progress of its ranks.

    Args:
        folder: The job's folder.
        spans_machines: Whether the job has ranks on other machines, which may be at work unseen.
        limit_before_launch: How many seconds a rank may be idle while it runs the script up to its launch; None for
            any number.
    """

    def __init__(self, folder: Path, *, spans_machines: bool, limit_before_launch: float | None = None) -> None:
        self._folder = folder
        self._spans_machines = spans_machines
        self._limit_before_launch = limit_before_launch
        self._timers: dict[int, IdleTimer] = {}
        self._beats: dict[int, int] = {}
        self._next_look = 0.0

    def idle_ranks(self, pids: Iterable[int]) -> dict[int, float]:
        """Return the processes that have been idle for longer than their limit, with that limit.

        Args:
            pids: The running ranks.
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
        """Restart all timers, after all ranks were stopped and continued."""
        for timer in self._timers.values():
            timer.restart()

    def _is_silent(self, pid: int) -> bool:
        """Return whether a rank is in a watched run, and has not beaten since the last look."""
        path = progress_file(self._folder, pid)
        try:
            time_ns = path.stat().st_mtime_ns
            if pid not in self._timers:
                limit, longest = map(float, path.read_text().split())
                self._timers[pid] = IdleTimer(longest + _PATIENCE if self._spans_machines else limit)
        except OSError:  # no file: it is in no run
            if self._limit_before_launch is None or not self.is_before_launch(pid):
                self._timers.pop(pid, None)
                return False
            self._timers.setdefault(pid, IdleTimer(self._limit_before_launch))
            return True
        if self._beats.get(pid) != time_ns:
            self._beats[pid] = time_ns
            self._timers[pid].restart()
            return False
        return True

    def is_before_launch(self, pid: int) -> bool:
        """Return whether a rank runs the script, and has not yet come to its launch."""
        return self._limit_before_launch is not None and not launched_file(self._folder, pid).exists()


_INNERMOST = 3  # frames: torch's logger of collectives and our reduction may be further in


def waits_for_peers(innermost_frames: Iterable[str], *, is_busy: bool = False) -> bool:
    """Return whether a rank waits for its peers in a collective.

    Args:
        innermost_frames: The frames of its main thread, the innermost first, each as ``"/path/file.py in function"``.
        is_busy: Whether it uses a processor; then a backward pass does not mean that it waits.
    """
    prefixes = _prefixes_of_waits()
    if is_busy:
        prefixes = tuple(prefix for prefix in prefixes if "autograd" not in prefix)
    return any(frame.startswith(prefixes) for frame in islice(innermost_frames, _INNERMOST))


@cache
def _prefixes_of_waits() -> tuple[str, ...]:
    """Return the beginnings of the frames of code that waits for peers."""
    torch = importlib.util.find_spec("torch")  # does not import it
    assert torch is not None  # noqa: S101 - core requires it
    assert torch.origin is not None  # noqa: S101 - likewise
    ours, theirs = Path(__file__).parents[1], Path(torch.origin).parent
    folders = [theirs / "distributed", theirs / "autograd"]
    # Not the others of this folder, which call the program's step.
    modules = ("collectives", "full_state", "job", "matrix_exchange", "metric_states", "process_group")
    files = [str(ours / "parallel" / f"{module}.py") for module in modules]
    # On a GPU a collective returns at once, and the code that reads its result waits: single functions, as others of
    # these files are on the stack while a step or a program's loader computes.
    readers = {
        ours / "interfaces" / "strategy.py": ("read_values", "reduce_boolean_decision"),
        ours / "training" / "loops" / "stopping.py": ("take",),
        ours / "training" / "metrics" / "reduction.py": ("exchange_", "_reduce_all"),
    }
    functions = [f"{file} in {name}" for file, names in readers.items() for name in names]
    return *(os.path.join(folder, "") for folder in folders), *files, *functions  # noqa: PTH118 - the end of a folder's name
