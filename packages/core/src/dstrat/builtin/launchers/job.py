"""A job on this machine: its folder, where its ranks meet, and the environment that each of them gets."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JOB_VARIABLE = "DSTRAT_JOB"
"""Names the job's folder; every process of a job has it, also those that a rank has started."""
PID_VARIABLE = "DSTRAT_RANK_PID"
"""The process id of the rank itself, set by it; its own children are not ranks."""
LISTENER_VARIABLE = "DSTRAT_LISTENER"
"""File descriptor of the listening socket, in global rank 0 only."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The local part of a job.

    Attributes:
        folder: Where its processes leave files for each other.
        num_processes: Ranks on this machine.
        num_nodes: Machines.
        node_rank: This machine.
        address: Host name or address of the machine with rank 0.
        port: Where rank 0 listens.
        listener: The socket that it listens on; None where rank 0 opens its own.
        environ: What the user has set in the environment.
    """

    folder: Path
    num_processes: int
    num_nodes: int
    node_rank: int
    address: str
    port: int
    listener: socket.socket | None
    environ: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.num_processes * self.num_nodes

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the whole job."""
        return self.node_rank * self.num_processes + local_rank

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return a rank's whole environment: what the user has set, and what the job sets."""
        environ = {**os.environ, **self.environ}
        for name in (PID_VARIABLE, LISTENER_VARIABLE):  # of the rank that this job may have been started by
            environ.pop(name, None)
        defaults = {"OMP_NUM_THREADS": str(threads_per_rank(self.num_processes))}
        if self.num_nodes == 1:
            defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback_interface())
        return {**defaults, **environ, **self._rank_variables(local_rank)}

    def listener_of(self, local_rank: int) -> socket.socket | None:
        """Return the socket that a rank takes over: rank 0 does, where there is one."""
        return self.listener if self.global_rank(local_rank) == 0 else None

    def _rank_variables(self, local_rank: int) -> dict[str, str]:
        return {
            JOB_VARIABLE: str(self.folder),
            "RANK": str(self.global_rank(local_rank)),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@contextlib.contextmanager
def open_job(*, num_processes: int, num_nodes: int, environ: Mapping[str, str]) -> Iterator[Job]:
    """Make the folder and find the meeting point of a job; both are gone when the block ends.

    Raises:
        LaunchError: The port that ``MASTER_PORT`` asks for is taken.
    """
    nested = JOB_VARIABLE in environ  # then MASTER_PORT and the others are those of the rank that started us
    listener = None
    if num_nodes == 1:
        port = 0 if nested else int(environ.get("MASTER_PORT", 0))
        listener = _listen(port)
        address, port = listener.getsockname()
        node_rank = 0
    else:
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        node_rank = int(environ["NODE_RANK"])
    folder = Path(tempfile.mkdtemp(prefix="dstrat-job-"))
    try:
        yield Job(
            folder=folder,
            num_processes=num_processes,
            num_nodes=num_nodes,
            node_rank=node_rank,
            address=address,
            port=port,
            listener=listener,
            environ=environ,
        )
    finally:
        if listener is not None:
            listener.close()
        shutil.rmtree(folder, ignore_errors=True)


def threads_per_rank(num_processes: int) -> int:
    """Return how many threads each rank may use so that together they fill the processors, and no more."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        usable = os.cpu_count() or 1
    return max(1, usable // num_processes)


def _listen(port: int) -> socket.socket:
    """Listen on the loopback only; port 0 takes any free one, and holding it excludes a collision."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise LaunchError(
            f"MASTER_PORT is {port}, and that port cannot be used ({reason}): unset MASTER_PORT, and a free port is "
            "found, or choose another"
        ) from None


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])
