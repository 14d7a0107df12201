"""Elastic jobs: when a rank is killed, the others keep their processes and go on as fewer ranks.

The supervisor and the ranks exchange files in the job's folder.  Those with a number are of one attempt:

1. ``elastic.json``: with how many ranks a fit can go on, and of which launch; without it a death ends all ranks.
2. ``regroup-0``: the supervisor has seen a rank die, and the others close their communication.
3. ``ready-0-PID``: the process has closed it, and waits.
4. ``group-1.json``: the ranks of the next attempt, by process.

All ranks are restarted instead if one is not ready in time, fails in another way, or there is no checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.launch.job import REGROUP_FILE, RESTART_VARIABLE, STARTED_VARIABLE
from dstrat.launch.rank import this_rank
from dstrat.launch.run_record import record_failure

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from dstrat.errors import RankFailedError
    from dstrat.launch.processes import RankProcess
    from dstrat.launch.recovery import Recovery
    from dstrat.launch.signals import Watchdog

_SIZES_FILE = "elastic.json"
_POLL = 0.005  # seconds between two looks, of which a death costs a few
_ANNOUNCEMENT = 1.0  # seconds within which the supervisor sees a death
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
    while not _regroup_file(rank.folder, _attempt()).exists():
        # A peer that has failed by itself, after which the supervisor ends all ranks.
        if time.monotonic() > deadline or any(rank.folder.glob("failure-*.json")):
            return False
        time.sleep(_POLL)
    return True


def join_group() -> bool:
    """Wait for the supervisor, and become a rank of the next attempt; the environment has its variables then.

    Returns:
        Whether there is a next attempt with this process; otherwise the supervisor ends it.
    """
    rank = this_rank()
    assert rank is not None  # noqa: S101 - only a rank waits
    attempt, pid = _attempt(), str(os.getpid())
    _ready_file(rank.folder, attempt, os.getpid()).touch()
    deadline = time.monotonic() + 2 * READY  # it is answered or killed before
    while not (group := _group_file(rank.folder, attempt + 1)).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    ranks = json.loads(group.read_text())
    if pid not in ranks:
        return False
    number, size = str(ranks[pid]), str(len(ranks))
    os.environ.setdefault(STARTED_VARIABLE, os.environ["WORLD_SIZE"])
    os.environ.update(
        {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            RESTART_VARIABLE: str(attempt + 1),
        }
    )
    return True


def _attempt() -> int:
    return int(os.environ[RESTART_VARIABLE])


# The side of the supervisor


@dataclass
class Regrouping:
    """The regroupings of a job after deaths of its ranks.

    Args:
        folder: The job's folder.
        recovery: The attempts of the job.
        watchdog: Guards the process groups of the ranks.
    """

    folder: Path
    recovery: Recovery
    watchdog: Watchdog

    def begin(self, error: RankFailedError, num_survivors: int) -> bool:
        """Announce a regrouping after a death; return False where all ranks have to be restarted instead.

        Args:
            error: The death.
            num_survivors: Number of ranks that go on.
        """
        sizes, _ = self._read_offer()
        if num_survivors not in sizes or self.recovery.why_final(self.folder, error) is not None:
            return False
        _regroup_file(self.folder, self.recovery.restart_count).touch()
        return True

    def bury(self, process: RankProcess) -> None:
        """End the children of a rank that has died.

        Workers of a loader are forks, which keep its connections open, so that its peers would not notice its end.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def is_ready(self, process: RankProcess) -> bool:
        """Return whether a rank has closed its communication."""
        return _ready_file(self.folder, self.recovery.restart_count, process.pid).exists()

    def form_group(
        self, survivors: Sequence[RankProcess], ended: Sequence[RankProcess], error: RankFailedError
    ) -> Sequence[RankProcess] | None:
        """Make the survivors the ranks of the next attempt, and return them; None without a checkpoint for them.

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
        self.recovery.begin_attempt(self.folder)
        ordered = sorted(survivors, key=lambda process: process.rank)
        ranks = {str(process.pid): number for number, process in enumerate(ordered)}
        _write(_group_file(self.folder, self.recovery.restart_count), json.dumps(ranks))
        return [process.with_rank(number) for number, process in enumerate(ordered)]

    def _read_offer(self) -> tuple[list[int], int]:
        """Return what :func:`offer_sizes` has written; no sizes without that."""
        try:
            offer = json.loads((self.folder / _SIZES_FILE).read_text())
        except FileNotFoundError:
            return [], -1
        return offer["sizes"], offer["launch"]


def _regroup_file(folder: Path, attempt: int) -> Path:
    return folder / f"{REGROUP_FILE}-{attempt}"


def _ready_file(folder: Path, attempt: int, pid: int) -> Path:
    return folder / f"ready-{attempt}-{pid}"


def _group_file(folder: Path, attempt: int) -> Path:
    return folder / f"group-{attempt}.json"


def _write(path: Path, text: str) -> None:
    """Write a file that is complete when it has its name."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)
