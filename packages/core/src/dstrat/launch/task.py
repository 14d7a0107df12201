"""Ranks in processes that a plugin's launcher starts: what each runs, and how the job ends."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.launch.failures import Failure, RankEnd, describe_failure, failure_error
from dstrat.launch.job import LOOPBACK, LocalJob, load_payload, write_payload
from dstrat.launch.rank import enter_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.launcher import Launcher


def dump_call(call: Callable[[], Any]) -> bytes:
    """Return a function as bytes; tensors are copied.

    Raises:
        Exception: Any error of its pickling.
    """
    buffer = io.BytesIO()
    write_payload(buffer, call)
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOutcome:
    """The end of a rank.

    Attributes:
        rank: Its global rank.
        exit_code: 0 where it has returned; negative for a signal, None where nobody knows how its process ended.
        result: What the function returned in rank 0, as bytes.
        failure: The exception that it raised, if any.
        time_ns: When it ended, nanoseconds since the epoch.
    """

    rank: int
    exit_code: int | None
    result: bytes = b""
    failure: Failure | None = None
    time_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """A rank of a job, to be called once in a process of its own, which ends afterwards.

    It can be pickled.  In that process ``LocalEnvironment`` describes the rank.

    Attributes:
        rank: Its global rank.
        local_rank: Its rank on its machine.
        node_rank: Index of its machine.
        processes_per_node: Number of ranks on each machine.
        num_nodes: Number of machines.
        address: Host name or address of the machine with rank 0.
        port: Port on which rank 0 listens; unused if all ranks are on one machine, where they meet through a file.
        folder: Name of the job's folder in the folder of temporary files.
        call: The function, from :func:`dump_call` or another pickler.
    """

    rank: int
    local_rank: int
    node_rank: int
    processes_per_node: int
    num_nodes: int
    address: str
    port: int
    folder: str
    call: bytes

    def __call__(self) -> RankOutcome:
        """Run the function as this rank; an exception becomes the outcome's failure."""
        folder = Path(tempfile.gettempdir(), self.folder)
        folder.mkdir(mode=0o700, exist_ok=True)  # the first rank of each machine makes it
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends, as other jobs' folders
        os.environ.update(self._job(folder).rank_environment(self.local_rank))
        if (torch := sys.modules.get("torch")) is not None:  # which has read the variable already
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        enter_rank(folder, runs_script=False, parent=None)  # the launcher itself ends its processes
        try:
            result = load_payload(self.call)()
            content = dump_call(result) if self.rank == 0 else b""
        except BaseException as error:  # noqa: BLE001 - the launcher raises it
            failure = describe_failure(error)
            return RankOutcome(rank=self.rank, exit_code=1, failure=failure, time_ns=failure.time_ns)
        return RankOutcome(rank=self.rank, exit_code=0, result=content, time_ns=time.time_ns())

    def died(self, exit_code: int | None = None) -> RankOutcome:
        """Return the outcome for a process that has ended without one."""
        return RankOutcome(rank=self.rank, exit_code=exit_code, time_ns=time.time_ns())

    def _job(self, folder: Path) -> LocalJob:
        return LocalJob(
            folder=folder,
            num_processes=self.processes_per_node,
            num_nodes=self.num_nodes,
            node_rank=self.node_rank,
            address=self.address,
            port=self.port,
            environ={},  # besides os.environ, which is that of this machine
        )


def make_rank_tasks(launcher: Launcher, call: bytes, *, address: str = LOOPBACK, port: int = 0) -> list[RankTask]:
    """Return the ranks of a job.

    Args:
        launcher: Has the number of processes and machines.
        call: The function, from :func:`dump_call` or another pickler.
        address: Host name or address of the machine with rank 0, which all machines can reach.
        port: A free port of that machine; 0 if all ranks are on one machine.
    """
    folder = f"dstrat-job-{uuid.uuid4().hex}"
    return [
        RankTask(
            rank=node_rank * launcher.processes_per_node + local_rank,
            local_rank=local_rank,
            node_rank=node_rank,
            processes_per_node=launcher.processes_per_node,
            num_nodes=launcher.num_nodes,
            address=address,
            port=port,
            folder=folder,
            call=call,
        )
        for node_rank in range(launcher.num_nodes)
        for local_rank in range(launcher.processes_per_node)
    ]


def remove_job_folder(task: RankTask) -> None:
    """Remove the job's folder of this machine, when its processes have ended."""
    shutil.rmtree(Path(tempfile.gettempdir(), task.folder), ignore_errors=True)


def result_of_ranks(outcomes: Iterable[RankOutcome], world_size: int) -> Any:
    """Return the function's result in rank 0.

    Args:
        outcomes: Of all ranks that have ended.
        world_size: Number of ranks.

    Raises:
        RankFailedError: A rank failed; the error has the traceback of the primary failure.
    """
    ends, results = [], {}
    for outcome in outcomes:
        ends.append(
            RankEnd(rank=outcome.rank, exit_code=outcome.exit_code, failure=outcome.failure, time_ns=outcome.time_ns)
        )
        results[outcome.rank] = outcome.result
    if any(end.is_failure for end in ends):
        raise failure_error(ends, {}, world_size)
    return load_payload(results[0])
