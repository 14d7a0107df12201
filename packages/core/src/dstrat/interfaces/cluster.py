"""Interface of cluster environments: ranks, sizes and the address of rank 0."""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar

from dstrat.errors import RequestError
from dstrat.interfaces.retired_members import RetiredMembers


@cache
def this_machine() -> str:
    """Return the name of this machine and of its namespace of process ids, as containers have separate ones."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{platform.node()} {namespace}"


class ClusterEnvironment(RetiredMembers, ABC):
    """Where a job runs: its processes, which of them is this one, and whether they exist already.

    A cluster environment only reads: no method writes to the environment.  Everything is read from ``environ``,
    ``os.environ`` by default, so tests pass a dictionary.  The process that plans the job calls :meth:`evidence` and
    :meth:`validate`; every rank reads the other properties, in any order and often.  Nothing communicates.  The
    smallest complete subclass, of all that must be overridden::

        class MyCluster(ClusterEnvironment):
            @classmethod
            def evidence(cls, environ):
                return "MY_JOB_ID is set" if "MY_JOB_ID" in environ else None

            main_address = property(lambda self: self.environ["MY_HEAD_NODE"])
            main_port = property(lambda self: 29500)
            world_size = property(lambda self: int(self.environ["MY_SIZE"]))
            global_rank = property(lambda self: int(self.environ["MY_RANK"]))
            local_rank = property(lambda self: int(self.environ["MY_LOCAL_RANK"]))
            node_rank = property(lambda self: int(self.environ["MY_NODE"]))
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "detect": "it is evidence",
        "validate_settings": "it is validate",
        "set_global_rank": "ranks are read from the environment, and are those of the processes that run",
        "set_world_size": "the size is read from the environment, and is the number of the processes that run",
        "teardown": "a cluster environment only reads",
    }

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ  # not the default, which saved configurations show
        if not isinstance(environ, Mapping):
            raise RequestError(
                f"{type(self).__name__}({environ!r}) takes environment variables, such as os.environ, or nothing"
            )
        self.environ = environ

    @classmethod
    @abstractmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        """Return in a few words why this process runs in this environment; None if it does not.

        For example ``"SLURM_STEP_ID is set"``.
        """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether one process per rank exists already, so that dstrat launches none."""
        return True

    @property
    @abstractmethod
    def main_address(self) -> str:
        """Host name or address of the machine with global rank 0."""

    @property
    @abstractmethod
    def main_port(self) -> int:
        """Port on which global rank 0 listens for the others."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of processes of the job."""

    @property
    @abstractmethod
    def global_rank(self) -> int:
        """Rank of this process in the job, from 0."""

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """Rank of this process on its machine, from 0."""

    @property
    @abstractmethod
    def node_rank(self) -> int:
        """Rank of this machine, from 0."""

    @property
    def listening_socket(self) -> int | None:
        """File descriptor of a socket that listens on ``main_address:main_port`` already, in global rank 0 only.

        With it the rendezvous opens no other port: no other program can take the port meanwhile, and it listens on no
        other interface.
        """
        return None

    @property
    def store_file(self) -> str | None:
        """Path of the rendezvous file of ranks that are all on this machine; None if they meet at the address.

        It is in a folder that only the job's user can open.  A store that listens on a port can be read and written by
        every user of the machine.
        """
        return None

    @property
    def stop_signal(self) -> int | None:
        """Number of the signal that stops the job; None if it is not being stopped.

        Ranks that wait for their peers to start stop then, because some may have ended already.
        """
        return None

    @property
    def has_lost_rank(self) -> bool:
        """Whether a rank of the job has died, and the others are to go on without it.

        Ranks that wait for all of them stop waiting then.
        """
        return False

    @property
    def num_started(self) -> int:
        """Number of processes that were started; more than :attr:`world_size` where the job goes on without some."""
        return self.world_size

    @property
    def store_is_served(self) -> bool:
        """Whether something else listens on ``main_address:main_port`` for the ranks already, as torchrun does."""
        return False

    restart_option: str | None = "the restart option of what starts the processes"
    """What restarts the processes after a failure, such as ``"torchrun --max-restarts"``; None where dstrat does."""

    @property
    def attempt(self) -> int:
        """Number of restarts of the job, which separates the keys of attempts in a store that outlives them."""
        return 0

    @property
    def job_id(self) -> str | None:
        """Name of the job that its restarts have too, and jobs beside it do not; None if there is none."""
        return None

    @property
    def requeue_signal(self) -> int | None:
        """Number of the signal after which the job is queued again, once it has saved a checkpoint; None if it is not.

        It is SIGUSR1, SIGTERM or SIGHUP.
        """
        return None

    def requeue(self) -> None:
        """Queue the job again; called in global rank 0 alone, after all ranks have stopped by ``requeue_signal``.

        Raises:
            ClusterError: The scheduler refuses.
        """
        raise NotImplementedError(f"{type(self).__name__} has a requeue_signal, and does not define requeue()")

    def validate(self, *, num_devices: int, num_nodes: int) -> None:
        """Check the environment against the request, before anything starts.

        Args:
            num_devices: Devices, and so processes, per machine.
            num_nodes: Machines.

        Raises:
            ClusterError: The environment contradicts the request or itself.
        """
