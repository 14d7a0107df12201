"""Job that this process has joined: its store, cluster, timeout and channels, and reports through the store."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from dstrat.errors import LaunchError, PeerError
from dstrat.interfaces.cluster import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from dstrat.interfaces.cluster import ClusterEnvironment


TIMEOUT_HINT = "see what it does, or give the strategy a longer timeout=timedelta(...)"

_OPENING = "come to open the process group"
_SHORTEST_PAUSE = 0.001  # seconds between two looks into the store, at first


class Channel(Protocol):
    """Exchange of bytes among the ranks of a job, in any thread, independent of other channels."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank, on each of them; collective."""


class Job(dist.PrefixStore):
    """The open communication of this process with the other ranks.

    It is the store that all ranks share, with a separate prefix for this opening.

    Args:
        store: The store of all openings.
        prefix: Prefix of this opening's keys.
        cluster: The cluster environment, with the rank of this process.
        timeout: How long a rank waits for the others.
        open_channel: Returns a new channel, if the job has no process group; called in the same order in every rank.

    Attributes:
        failed_step: What ended the first step that has failed in this process since this opening; "" if none has.
        has_lost_messages: Whether messages of that step may be on their way, which no rank receives.
    """

    # A store, and not an object that has one: packages use the result of ``open_process_group`` as a store.

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        *,
        cluster: ClusterEnvironment,
        timeout: timedelta,
        open_channel: Callable[[], Channel] | None = None,
    ) -> None:
        super().__init__(prefix, store)
        self.cluster, self._timeout, self.open_channel = cluster, timeout, open_channel
        self.failed_step, self.has_lost_messages = "", False

    @property
    def timeout(self) -> timedelta:  # the store's property is that of its operations, which a program may change
        """How long a rank waits for the others."""
        return self._timeout

    @property
    def address(self) -> str | None:
        """The address at which rank 0 serves the store; None if something else does."""
        if self.cluster.store_file is not None or self.cluster.store_is_served:
            return None
        return f"{self.cluster.main_address}:{self.cluster.main_port}"

    def clone_store(self, prefix: str, timeout: timedelta) -> dist.Store:
        """Return another connection to the store, for a thread.

        Args:
            prefix: Prefix of its keys.
            timeout: Timeout of its operations.
        """
        # A store serves one operation at a time, and a thread's would wait for those of the main thread.
        store = dist.PrefixStore(prefix, self.clone())  # type: ignore[attr-defined]  # not in torch's stubs
        store.set_timeout(timeout)
        return store

    def wait_for_opening(self) -> None:
        """Wait until all ranks are about to open communication; collective.

        Raises:
            LaunchError: Ranks timed out; the message names them.
        """
        self.wait_for_all_ranks(_OPENING)

    def wait_for_all_ranks(self, action: str) -> None:
        """Wait until all ranks have called this; collective.

        torch's own waiting neither names missing ranks nor returns when a signal arrives.

        Args:
            action: The completed action, for the message about missing ranks, such as "open the device mesh"; each name
                may be used once in a job.

        Raises:
            LaunchError: Ranks timed out.
            PeerError: A rank of an elastic job has died.
        """
        rank, size = self.cluster.global_rank, self.cluster.world_size
        all_came = f"all {action}"
        self.set(f"{rank} {action}", f"{os.getpid()} {this_machine()}")
        if self.add(f"number {action}", 1) == size:
            self.set(all_came, "")
        seconds = self.timeout.total_seconds()
        deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
        longest = 0.01 + 1e-4 * size  # limits the requests to the store to 10,000 in a second
        while not self.check([all_came]):
            if (number := self.cluster.stop_signal) is not None:
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            if self.cluster.has_lost_rank:
                raise PeerError(f"a rank has died before all {size} did {action}")
            if time.monotonic() > deadline:
                missing = [str(other) for other in range(size) if not self.check([f"{other} {action}"])]
                ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
                raise LaunchError(
                    f"timed out waiting for {ranks} of {size}, which did not {action} within {seconds:g} s: "
                    f"{TIMEOUT_HINT}"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def read_processes(self) -> dict[int, tuple[int, str]]:
        """Return the process id of each rank and its machine; empty if the user has opened the process group.

        Raises:
            RuntimeError: What serves the store does not respond.
        """
        keys = [f"{rank} {_OPENING}" for rank in range(self.cluster.world_size)]
        if not self.check(keys):
            return {}
        texts = [value.decode().split(" ", 1) for value in self.multi_get(keys)]
        return {rank: (int(pid), machine) for rank, (pid, machine) in enumerate(texts)}

    def write_failure_report(self, text: str) -> None:
        """Write the failure of this rank into the store, for ranks of other machines."""
        # Numbered, so that readers ask for what has been written, and not once for each rank.
        number = self.add("number of failures", 1)
        self.set(f"failure {number}", f"{self.cluster.global_rank} {text}")

    def read_failure_reports(self) -> dict[int, str]:
        """Return what ranks have written about their failures, by rank.

        Raises:
            RuntimeError: The rank that serves the store does not respond.
        """
        keys = [f"failure {number + 1}" for number in range(self.add("number of failures", 0))]
        if keys and not self.check(keys):  # a rank has its number, and has not written yet
            keys = [key for key in keys if self.check([key])]
        texts = [value.decode().split(" ", 1) for value in self.multi_get(keys)] if keys else []
        return {int(rank): text for rank, text in texts}


_current: Job | None = None  # of the process: hang detection and reports run in threads of their own


def current_job() -> Job | None:
    """Return the job that this process has joined and not left, in any thread; None without one."""
    return _current


def set_current_job(job: Job | None) -> None:
    """Record the job that this process has joined, None when it leaves."""
    global _current  # noqa: PLW0603 - as above
    _current = job


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the size of the open process group or joined job; 0 and 1 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    job = current_job()
    return (0, 1) if job is None else (job.cluster.global_rank, job.cluster.world_size)
