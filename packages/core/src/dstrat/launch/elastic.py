"""Elastic jobs: when a rank is killed, the others keep their processes and go on as fewer ranks.

The supervisor and the ranks exchange files in the job's folder.  Those with a number are of one group:

1. ``elastic.json``: with how many ranks a fit can go on, and of which launch; without it a death ends all ranks.
2. ``regroup-0``: the supervisor has seen a rank die, and the others close their communication.
3. ``ready-0-PID``: the process has closed it, and waits.
4. ``group-1.json``: the ranks of the next group, by process.

All ranks are restarted instead if one is not ready in time, fails in another way, or there is no checkpoint.

A new process, a newcomer, may then take the place of the one that has died:

1. ``joining-PID``: the process is no rank yet, and its failure does not end the job.
2. ``waiting-PID``: it has come to the fit, and waits; the file has the number of its launch.
3. ``newcomers-1``: the ranks of the group save a checkpoint after their next step, and close their communication.
4. ``ready-1-PID`` and ``group-2.json``, as above; the newcomers are among the ranks of this group, unless they have
   ended meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dstrat.launch.failures import forget_failures, read_failure
from dstrat.launch.job import (
    GROUP_VARIABLE,
    NEWCOMER_VARIABLE,
    REGROUP_FILE,
    RESTART_VARIABLE,
    STARTED_VARIABLE,
    STOP_FILE,
)
from dstrat.launch.rank import this_rank
from dstrat.launch.run_record import record_failure
from dstrat.launch.signals import show_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from dstrat.errors import RankFailedError
    from dstrat.launch.processes import RankProcess
    from dstrat.launch.recovery import Recovery
    from dstrat.launch.signals import Watchdog

_SIZES_FILE = "elastic.json"
_POLL = 0.005  # seconds between two looks, of which a death costs a few
_ANNOUNCEMENT = 1.0  # seconds within which the supervisor sees a death
_CLEANUP = 600.0  # seconds for a rank that leaves its group for newcomers to end its run: loggers may write long
_DISMISSAL = 5.0  # seconds for a killed process to end
_ARRIVAL = 60.0  # seconds for a newcomer to come to the fit, after which a line says that it is late
READY = 20.0
"""Seconds for ranks to close their communication: a restart of all takes less than a longer wait would save."""


# The side of the ranks


def offer_sizes(sizes: Collection[int], launch: int) -> None:
    """Write for the supervisor with how many ranks this fit can go on.

    Args:
        sizes: Numbers of ranks.
        launch: Number of the launch in the program.
    """
    rank = this_rank()
    if rank is not None:
        with contextlib.suppress(FileNotFoundError):  # the folder was removed
            _write(rank.folder / _SIZES_FILE, json.dumps({"sizes": sorted(sizes), "launch": launch}))


def withdraw_sizes() -> None:
    """Undo :func:`offer_sizes` at the end of the fit."""
    rank = this_rank()
    if rank is not None:
        (rank.folder / _SIZES_FILE).unlink(missing_ok=True)


def wait_for_regrouping(*, is_expected: bool) -> bool:
    """Return whether the ranks of this job regroup, because one of them has died.

    Args:
        is_expected: Whether this rank has lost a peer, of whose death the supervisor may not know yet.
    """
    rank = this_rank()
    if rank is None:
        return False
    deadline = time.monotonic() + (_ANNOUNCEMENT if is_expected else 0.0)
    while not _regroup_file(rank.folder, _group()).exists():
        # A peer that has failed by itself, after which the supervisor ends all ranks.
        if time.monotonic() > deadline or _has_failed_rank(rank.folder):
            return False
        time.sleep(_POLL)
    return True


def _has_failed_rank(folder: Path) -> bool:
    """Return whether a rank has written a failure, other than a newcomer, which is no rank yet."""
    failures = [(path, path.stem.split("-")[1]) for path in folder.glob("failure-*.json")]
    # The supervisor removes both files of a newcomer, that of the failure first.
    return any(not _joining_file(folder, pid).exists() and path.exists() for path, pid in failures)


def join_group() -> bool:
    """Wait for the supervisor, and become a rank of the next group; the environment has its variables then.

    Returns:
        Whether there is a next group with this process; otherwise the supervisor ends it.
    """
    rank = this_rank()
    assert rank is not None  # noqa: S101 - only a rank waits
    group = _group()
    _ready_file(rank.folder, group, os.getpid()).touch()
    # It is answered or killed before, unless another rank takes too long.
    deadline = time.monotonic() + (_CLEANUP if has_newcomers() else 2 * READY)
    while not _group_file(rank.folder, group + 1).exists():
        _obey_stop(rank.folder)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return _enter_group(rank.folder, group + 1)


def has_newcomers() -> bool:
    """Return whether new processes wait to become ranks of this job."""
    rank = this_rank()
    return rank is not None and _newcomers_file(rank.folder, _group()).exists()


def wait_as_newcomer(launch: int) -> bool:
    """Wait, if this process is to take the place of a rank that has died, until it is one; return whether it is.

    Args:
        launch: Number of the launch in the program, which has to be that of the ranks.
    """
    rank = this_rank()
    if rank is None or NEWCOMER_VARIABLE not in os.environ:
        return False
    _write(_arrival_file(rank.folder, os.getpid()), str(launch))
    # For any time: ranks may be in a long validation, and the supervisor ends this process if they do not need it.
    group = 1
    while True:
        while _group_file(rank.folder, group).exists():
            if _enter_group(rank.folder, group):
                return True
            group += 1
        _obey_stop(rank.folder)
        time.sleep(_POLL)


def _enter_group(folder: Path, group: int) -> bool:
    """Write the variables of a group's rank into the environment; return False if this process is none of them."""
    content = json.loads(_group_file(folder, group).read_text())
    number = content["ranks"].get(str(os.getpid()))
    if number is None:
        return False
    size = str(len(content["ranks"]))
    os.environ.setdefault(STARTED_VARIABLE, os.environ["WORLD_SIZE"])
    os.environ.pop(NEWCOMER_VARIABLE, None)
    os.environ.update(
        {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            GROUP_VARIABLE: str(group),
            RESTART_VARIABLE: str(content["restart_count"]),
        }
    )
    return True


def _obey_stop(folder: Path) -> None:
    """End this process if a signal stops the job."""
    with contextlib.suppress(FileNotFoundError, ValueError):  # ValueError: it is being written
        raise SystemExit(128 + int((folder / STOP_FILE).read_text()))


def _group() -> int:
    return int(os.environ.get(GROUP_VARIABLE, "0"))


# The side of the supervisor


@dataclass
class Regrouping:
    """The regroupings of a job after deaths of its ranks.

    Args:
        folder: The job's folder.
        recovery: The attempts of the job.
        watchdog: Guards the process groups of the ranks.
        start_newcomer: Starts a process that is to become the rank of a number; None if none takes the place of a rank
            that has died.

    Attributes:
        group: Number of groups before that of the ranks.
        newcomers: Processes that are to take the places of ranks that have died.
    """

    folder: Path
    recovery: Recovery
    watchdog: Watchdog
    start_newcomer: Callable[[int], RankProcess] | None = None
    group: int = 0
    newcomers: list[RankProcess] = field(default_factory=list)
    _is_announced: bool = False  # the ranks leave their group, for one with the newcomers
    _late_at: float = float("inf")  # of the clock, until it was said that newcomers are late

    def begin(self, error: RankFailedError, num_survivors: int) -> bool:
        """Announce a regrouping after a death; return False where all ranks have to be restarted instead.

        Args:
            error: The death.
            num_survivors: Number of ranks that go on.
        """
        sizes, _ = self._read_offer()
        if num_survivors not in sizes or self.recovery.why_final(self.folder, error) is not None:
            return False
        _regroup_file(self.folder, self.group).touch()
        return True

    def bury(self, process: RankProcess) -> None:
        """End the children of a rank that has died.

        Workers of a loader are forks, which keep its connections open, so that its peers would not notice its end.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def is_ready(self, process: RankProcess) -> bool:
        """Return whether a rank has closed its communication."""
        return _ready_file(self.folder, self.group, process.pid).exists()

    def form_group(
        self, survivors: Sequence[RankProcess], ended: Sequence[RankProcess], error: RankFailedError
    ) -> Sequence[RankProcess] | None:
        """Make the survivors the ranks of the next group, and return them; None without a checkpoint for them.

        Args:
            survivors: The ranks that are ready.
            ended: The ranks that have died.
            error: The death that was first.
        """
        sizes, launch = self._read_offer()
        if len(survivors) not in sizes or not self.recovery.can_continue(self.folder, launch):
            return None
        self.recovery.regroup(self.folder, error, len(survivors))
        for process in ended:
            self.watchdog.forget(process.pid)
        record_failure(self.folder, error)
        group = self._announce(sorted(survivors, key=lambda process: process.rank))
        self._start_newcomers(len(group), len(ended))
        return group

    def grow(self, ranks: Sequence[RankProcess]) -> Sequence[RankProcess] | None:
        """Let newcomers and ranks form a larger group when all of them are ready, and return it; None until then.

        Args:
            ranks: The ranks, which all run.
        """
        for process in [each for each in self.newcomers if each.poll() is not None]:
            self._drop(process)
        if not self.newcomers:
            return self._retract(ranks) if self._is_announced else None
        files = [_arrival_file(self.folder, process.pid) for process in self.newcomers]
        if not all(file.exists() for file in files):
            self._name_late(files)
            return None
        sizes, launch = self._read_offer()
        reason = None
        if not sizes:
            reason = ""  # the fit is over
        elif any(int(file.read_text()) != launch for file in files):
            reason = "the ranks are in a later call of the Trainer than the first one of the script"
        elif len(ranks) + len(files) not in sizes:  # another newcomer has failed
            reason = "the samples of a step cannot be divided by their number"
        if reason is not None:
            self.dismiss(reason)
            return None
        _newcomers_file(self.folder, self.group).touch()
        self._is_announced = True
        # A death here is noticed before: it forms a smaller group first.
        if not all(map(self.is_ready, ranks)):
            return None
        self.recovery.grow(self.folder, len(files), len(ranks) + len(files))
        group = self._announce([*ranks, *self.newcomers])
        for process in self.newcomers:
            _joining_file(self.folder, process.pid).unlink()
        self.newcomers = []
        return group

    def _name_late(self, files: Sequence[Path]) -> None:
        """Print once that a newcomer has not come for long; its time is not limited, as it may prepare data.

        Args:
            files: The file of each newcomer that says it has come.
        """
        if time.monotonic() <= self._late_at:
            return
        self._late_at = float("inf")
        late = [process.pid for process, file in zip(self.newcomers, files, strict=True) if not file.exists()]
        show_line(
            f"process {late[0]} is to take the place of a rank that was killed, and has not come to the fit after "
            f"{_ARRIVAL:.0f} s: the ranks train without it"
        )

    def _retract(self, ranks: Sequence[RankProcess]) -> Sequence[RankProcess] | None:
        """Undo the announcement of newcomers that have ended since.

        Ranks that have left their group for them form one without; it is returned when all of them are ready.
        """
        _newcomers_file(self.folder, self.group).unlink(missing_ok=True)
        if not all(map(self.is_ready, ranks)):
            return None
        self.recovery.grow(self.folder, 0, len(ranks))
        return self._announce(ranks)

    def dismiss(self, reason: str = "") -> None:
        """End the newcomers, which are not ranks yet.

        Args:
            reason: Why no rank needs them, to print it.
        """
        if self.newcomers and reason:
            show_line(f"no process takes the place of a rank that was killed, as {reason}")
        for process in self.newcomers:
            self.bury(process)
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # a fork server has reaped it
                    os.kill(process.pid, signal.SIGKILL)  # it may not have made its process group yet
            deadline = time.monotonic() + _DISMISSAL
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL)
            self._forget(process)
        self.newcomers = []

    def _announce(self, ranks: Sequence[RankProcess]) -> list[RankProcess]:
        """Write the numbers of the ranks of the next group, and return these ranks."""
        self.recovery.begin_attempt(self.folder)
        self.group, self._is_announced = self.group + 1, False
        numbers = {str(process.pid): number for number, process in enumerate(ranks)}
        content = {"ranks": numbers, "restart_count": self.recovery.restart_count}
        _write(_group_file(self.folder, self.group), json.dumps(content))
        return [process.with_rank(number) for number, process in enumerate(ranks)]

    def _start_newcomers(self, num_ranks: int, count: int) -> None:
        """Start processes that are to take the places of ranks that have died."""
        if self.start_newcomer is None:
            return
        for _ in range(count):
            try:
                process = self.start_newcomer(num_ranks + len(self.newcomers))
            except OSError as error:  # too many processes, no memory: the ranks go on without
                show_line(f"no process takes the place of a rank that was killed, as none can be started: {error}")
                return
            _joining_file(self.folder, process.pid).touch()
            self.watchdog.guard(process.pid)
            self.newcomers.append(process)
            self._late_at = time.monotonic() + _ARRIVAL

    def _drop(self, process: RankProcess) -> None:
        """Forget a newcomer that has ended before it became a rank."""
        failure = read_failure(self.folder, process.pid)
        reason = f"exit code {process.poll()}" if failure is None else failure.headline
        show_line(f"the process that was to take the place of a rank that was killed has ended too: {reason}")
        self.newcomers.remove(process)
        self.bury(process)
        self._forget(process)

    def _forget(self, process: RankProcess) -> None:
        self.watchdog.forget(process.pid)
        forget_failures(self.folder, process.pid)
        _joining_file(self.folder, process.pid).unlink(missing_ok=True)
        _arrival_file(self.folder, process.pid).unlink(missing_ok=True)  # a later process may have its number

    def _read_offer(self) -> tuple[list[int], int]:
        """Return what :func:`offer_sizes` has written; no sizes without that."""
        try:
            offer = json.loads((self.folder / _SIZES_FILE).read_text())
        except FileNotFoundError:
            return [], -1
        return offer["sizes"], offer["launch"]


def _regroup_file(folder: Path, group: int) -> Path:
    return folder / f"{REGROUP_FILE}-{group}"


def _newcomers_file(folder: Path, group: int) -> Path:
    return folder / f"newcomers-{group}"


def _joining_file(folder: Path, pid: int | str) -> Path:
    return folder / f"joining-{pid}"


def _ready_file(folder: Path, group: int, pid: int) -> Path:
    return folder / f"ready-{group}-{pid}"


def _arrival_file(folder: Path, pid: int) -> Path:
    return folder / f"waiting-{pid}"


def _group_file(folder: Path, group: int) -> Path:
    return folder / f"group-{group}.json"


def _write(path: Path, text: str) -> None:
    """Write a file that is complete when it has its name."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
