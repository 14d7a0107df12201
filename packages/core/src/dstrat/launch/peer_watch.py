"""Hang detection among ranks that another launcher has started, through the store of their job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING

from dstrat.interfaces.cluster import this_machine
from dstrat.launch.ended_peers import continue_stopped
from dstrat.launch.failures import hang_error
from dstrat.launch.nccl_status import has_pending, read_collectives, wait_of
from dstrat.launch.progress import (
    MARGIN,
    PAUSE,
    IdleTimer,
    descendants_of,
    has_ended,
    read_activities,
    read_activity_of_this_process,
    waits_for_peers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import Store

# Of the ranks that wait.  If all of a thousand read the states of all, the store would be overloaded.
_NUM_OBSERVERS = 4  # of the job
_NUM_LOCAL_OBSERVERS = 2  # of each machine: only they see soon that a process there has stopped or ended
_NUM_STACKS = 16
_STORE_TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The state that a rank publishes once in each period.

    Attributes:
        number: Counts the periods; a rank whose number does not change is unresponsive.
        idle_seconds: How long it has been idle, without progress.
        waits_in_collective: Whether it has waited for its peers in one collective since the period before.
        has_ended: Whether it has left the run.
        machine: Name of the machine and of its process ids, which other ranks there can look up.
        pid: Its process id there.
    """

    number: int = 0
    idle_seconds: float = 0.0
    waits_in_collective: bool = False
    has_ended: bool = False
    machine: str = ""
    pid: int = 0


def find_hung_ranks(states: Mapping[int, RankState], unresponsive: set[int], limit: float) -> list[int]:
    """Return the ranks that block a job, in ascending order; empty while any rank is at work.

    Ranks that wait in no collective block the others.  Where all wait, their collectives do not match.

    Args:
        states: The states of all ranks, by rank.
        unresponsive: Ranks whose state has not changed for long, and that have no visible activity.
        limit: Seconds of idleness after which a rank hangs.
    """
    running = {rank: state for rank, state in states.items() if not state.has_ended}
    idle = [rank for rank, state in running.items() if rank in unresponsive or state.idle_seconds > limit]
    if not idle or any(rank not in idle and not state.waits_in_collective for rank, state in running.items()):
        return []
    # The last state of an unresponsive rank is out of date.
    blocking = [rank for rank in idle if rank in unresponsive or not running[rank].waits_in_collective]
    return sorted(blocking or idle)


class PeerWatch(threading.Thread):
    """Thread that watches its rank and the peers where there is no supervisor: under torchrun or a scheduler.

    Until the job's store is open, and when it does not respond, a rank sees only itself.  It then waits for the
    timeout of a collective, because peers may be at work.  The thread cannot run while its process is stopped, or
    while native code holds the GIL.  Peers on the same machine then read the activity of the process; peers on other
    machines wait for the timeout of a collective.

    A few observers read the states of all ranks.  Any other rank that waits reads them only when an observer suspects
    it: observers cannot end another rank, and each is to end with its stack.

    Args:
        limit: Seconds of idleness after which the job ends if no rank is at work.
        longest: Timeout of a collective, in seconds.
        rank: The global rank.
        local_rank: The rank on this machine.
        size: Number of ranks.
    """

    def __init__(self, limit: float, longest: float, *, rank: int, local_rank: int, size: int) -> None:
        super().__init__(name="dstrat-hang-watch", daemon=True)
        self._limit, self._longest, self._rank, self._size = limit, longest, rank, size
        self._is_observer = rank < _NUM_OBSERVERS or local_rank < _NUM_LOCAL_OBSERVERS
        self._timer = IdleTimer(limit)
        self._main = threading.get_ident()  # the thread that trains constructs the watch
        self._closed = threading.Event()
        self._has_beaten = False
        self._last_beat = time.monotonic()
        self._number = 0
        self._stack = ""  # of the main thread, when it was last looked at
        self._store: Store | None = None
        self._store_failed = False
        self._changes: dict[int, tuple[int, float]] = {}  # last number of each peer, and when it was first seen
        self._peer_timers: dict[int, IdleTimer] = {}
        self._last_tick = time.monotonic()
        self.start()

    def beat(self) -> None:
        """Note progress of the run."""
        self._has_beaten = True

    def close(self) -> None:
        """End the watch; peers no longer take this rank into account."""
        self._closed.set()
        self.join(5.0)  # at most, as the store may not respond
        if not self.is_alive() and self._store is not None:
            self._publish(RankState(number=self._number, has_ended=True))

    def run(self) -> None:
        while not self._closed.wait(self._timer.period):
            now = time.monotonic()
            was_paused = now - self._last_tick > 2 * self._timer.period + PAUSE
            self._last_tick = now
            if self._has_beaten or was_paused:
                self._has_beaten = False
                self._restart()
                self._publish(self._state())
            else:
                self._look(self._timer.update(read_activity_of_this_process()))
            self._number += 1

    def _restart(self) -> None:
        """Restart all timers, after progress or after the job was stopped and continued."""
        self._last_beat = time.monotonic()
        self._timer.restart()
        self._changes.clear()
        self._peer_timers.clear()

    def _state(self, *, idle_seconds: float = 0.0, waits_in_collective: bool = False) -> RankState:
        machine, pid = this_machine(), os.getpid()
        return RankState(
            number=self._number,
            idle_seconds=idle_seconds,
            waits_in_collective=waits_in_collective,
            machine=machine,
            pid=pid,
        )

    def _look(self, idle_seconds: float) -> None:
        """Publish the state of this rank, and end the job if it hangs."""
        stack = traceback.extract_stack(sys._current_frames()[self._main])  # noqa: SLF001 - there is no other way
        frames = [f"{frame.filename} in {frame.name}" for frame in reversed(stack)]
        collectives = read_collectives()  # of NCCL
        waits_in_collective = (
            waits_for_peers(frames, is_busy=idle_seconds < self._limit)
            if collectives is None
            else bool(has_pending(collectives))
        )
        # A rank at work may be met in one of its collectives, which will end: it waits if it stays there.
        previous, self._stack = self._stack, "\n".join(filter(None, [_format(stack), collectives]))
        waits_in_collective = waits_in_collective and wait_of(self._stack) == wait_of(previous)
        silent_seconds = time.monotonic() - self._last_beat
        has_stack = silent_seconds > self._limit / 2 and (waits_in_collective or idle_seconds > self._limit / 2)
        self._publish(
            self._state(idle_seconds=idle_seconds, waits_in_collective=waits_in_collective),
            self._stack if has_stack else None,
        )
        if self._store is None:
            # A store that failed belonged to a rank that has ended; no peer is at work then.
            limit = self._limit if self._store_failed else self._longest
            if idle_seconds > limit + MARGIN and not waits_in_collective:
                self._end({self._rank: self._stack}, limit)
        # From before the limit, to know since when a peer has not responded.
        elif silent_seconds > 2 * self._timer.period and (
            not waits_in_collective
            or self._is_observer
            or (idle_seconds > self._limit + MARGIN and self._is_suspected())
        ):
            self._look_at_peers()

    def _publish(self, state: RankState, stack: str | None = None) -> None:
        try:
            if (store := self._open_store()) is None:
                return
            if stack is not None:
                store.set(f"stack {self._rank}", stack)
            store.set(f"state {self._rank}", json.dumps(asdict(state)))
        except RuntimeError:  # rank 0, which serves the store, may have ended
            self._store, self._store_failed = None, True

    def _open_store(self) -> Store | None:
        if self._store is None and not self._store_failed and "dstrat.parallel.job" in sys.modules:
            from dstrat.parallel.job import current_job

            job = current_job()
            self._store = None if job is None else job.clone_store("hangs", _STORE_TIMEOUT)
        return self._store

    def _is_suspected(self) -> bool:
        """Return whether an observer reported this rank as hung; that may be out of date."""
        try:
            return self._store is not None and self._store.check([f"suspect {self._rank}"])
        except RuntimeError:
            self._store, self._store_failed = None, True
            return False

    def _look_at_peers(self) -> None:
        """End this rank if it hangs, or if it waits for hung ranks that cannot end by themselves."""
        try:
            states = self._read_states()
            unresponsive = self._find_unresponsive(states)
            hung = find_hung_ranks(states, unresponsive, self._limit + MARGIN)
            responsive = [rank for rank in hung if rank not in unresponsive]
            assert self._store is not None  # noqa: S101 - the states came from it
            # Each hung rank ends itself, as the launcher may end no other rank than the one that failed.
            if self._rank in responsive or (hung and not responsive):
                peers = [rank for rank, state in states.items() if rank not in hung and not state.has_ended]
                reported = [*islice(hung, _NUM_STACKS), *islice(peers, _NUM_STACKS)]
                is_first = self._store.add("reports", 1) == 1
                nearby = [states[rank].pid for rank in unresponsive if states[rank].machine == this_machine()]
                self._end(self._read_stacks(reported) if is_first else {}, self._limit, hung, stopped=nearby)
            for rank in responsive:
                self._store.set(f"suspect {rank}", "")
        except RuntimeError:
            self._store, self._store_failed = None, True

    def _find_unresponsive(self, states: Mapping[int, RankState]) -> set[int]:
        """Return the peers that no longer publish their state and have no visible activity."""
        now = time.monotonic()
        for rank, state in states.items():
            if rank not in self._changes or self._changes[rank][0] != state.number:
                self._changes[rank] = (state.number, now)
                self._peer_timers.pop(rank, None)
        silent = {rank: now - since for rank, (_, since) in self._changes.items()}
        silent = {rank: seconds for rank, seconds in silent.items() if seconds > 2 * self._timer.period}
        nearby = {rank: states[rank].pid for rank in silent if states[rank].machine == this_machine()}
        activities = read_activities(nearby.values()) if nearby else {}
        unresponsive = set()
        for rank, silent_seconds in silent.items():
            pid = nearby.get(rank)
            if pid in activities:
                idle_seconds = self._peer_timers.setdefault(rank, IdleTimer(self._limit)).update(activities[pid])
                is_idle = idle_seconds > self._limit + MARGIN
            else:  # it has ended, is on another machine, or its activity cannot be read
                limit = self._limit if pid is not None and has_ended(pid) else self._longest
                is_idle = silent_seconds > limit + MARGIN
            if is_idle:
                unresponsive.add(rank)
        return unresponsive

    def _read_states(self) -> dict[int, RankState]:
        assert self._store is not None  # noqa: S101 - only called where it is open
        store, keys = self._store, {rank: f"state {rank}" for rank in range(self._size)}
        if not store.check(list(keys.values())):  # getting a missing key would block
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get(list(keys.values()))
        states = {rank: RankState(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}
        return {rank: states.get(rank, RankState(number=-1)) for rank in range(self._size)}

    def _read_stacks(self, ranks: list[int]) -> dict[int, str]:
        assert self._store is not None  # noqa: S101 - likewise
        stacks = {}
        for rank in ranks:
            with contextlib.suppress(RuntimeError):
                key = f"stack {rank}"
                stacks[rank] = self._store.get(key).decode() if self._store.check([key]) else ""
        return stacks

    def _end(
        self, stacks: dict[int, str], limit: float, hung: list[int] | None = None, stopped: Sequence[int] = ()
    ) -> None:
        """Print the hung ranks, with their stacks if any, and end this process.

        Args:
            stacks: Stacks of ranks, empty where another rank reports.
            limit: Seconds of idleness that are reported.
            hung: The hung ranks; this one if None.
            stopped: Processes of this machine that do not respond, and may have been stopped by a signal.
        """
        idle = dict.fromkeys(hung or [self._rank], limit)
        message = str(hang_error(idle, stacks or dict.fromkeys(idle, ""), self._size))
        if stacks:
            sys.stderr.write(f"{message}\n")
        else:
            # Let another rank report first: it may need this rank's store, and its end makes the launcher end all.
            time.sleep(MARGIN)
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun shows what is in it as the cause
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(TimeoutError(message))
        continue_stopped(stopped)  # a stopped process does not take torchrun's SIGTERM
        # Not sys.exit, which ends this thread only; so workers are ended, and output is written, by hand.
        for pid in descendants_of([os.getpid()]):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or of a terminal that is gone
                stream.flush()
        os._exit(1)


def _format(stack: traceback.StackSummary) -> str:
    """Return the stack in the format of faulthandler, which ranks started by dstrat use."""
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(stack)]
    return "\n".join(["Current thread (most recent call first):", *lines])
