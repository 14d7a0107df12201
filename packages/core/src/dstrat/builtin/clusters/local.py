"""Cluster environment of jobs whose ranks dstrat starts."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import Variables
from dstrat.errors import ClusterError
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.launch.job import (
    GROUP_VARIABLE,
    JOB_VARIABLE,
    LOOPBACK,
    PID_VARIABLE,
    REGROUP_FILE,
    RESTART_VARIABLE,
    STARTED_VARIABLE,
    STOP_FILE,
    STORE_FILE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_HINT = "with num_nodes above 1, set MASTER_ADDR, MASTER_PORT and NODE_RANK on each machine"


class LocalEnvironment(ClusterEnvironment):
    """Processes that dstrat starts on this machine.

    Before the launch it describes a single process.  In a rank and its workers it describes that rank; another program
    that a rank has started is no rank.  With several machines the user starts the script on each of them, with
    ``MASTER_ADDR``, ``MASTER_PORT`` and ``NODE_RANK``.

    An environment that was created from ``os.environ``, and is pickled for another process, describes that process.
    """

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "dstrat has started this process" if JOB_VARIABLE in environ else None

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), ()) if self.environ is os.environ else (type(self), (dict(self.environ),))

    restart_option = None  # dstrat itself restarts these ranks

    @property
    def is_rank(self) -> bool:
        """Whether this process is a rank that dstrat has started, or a worker of one (as of a DataLoader)."""
        parent = multiprocessing.parent_process()
        # By process id, as a program that a rank has started inherits the variables too.
        pids = {str(os.getpid()), str(parent.pid) if parent is not None else ""}
        return JOB_VARIABLE in self.environ and self.environ.get(PID_VARIABLE) in pids

    creates_processes_externally = is_rank

    @property
    def main_address(self) -> str:
        return self.environ["MASTER_ADDR"] if self.is_rank else LOOPBACK

    @property
    def main_port(self) -> int:
        """Port on which global rank 0 may listen for the others; 0 (any free one) before the launch."""
        return int(self.environ["MASTER_PORT"]) if self.is_rank else 0

    @property
    def world_size(self) -> int:
        return self._in_rank("WORLD_SIZE", 1)

    @property
    def global_rank(self) -> int:
        return self._in_rank("RANK", 0)

    @property
    def local_rank(self) -> int:
        return self._in_rank("LOCAL_RANK", 0)

    @property
    def node_rank(self) -> int:
        return self._in_rank("NODE_RANK", 0)

    @property
    def store_file(self) -> str | None:
        # A file on this machine; ranks of several machines meet at the address.
        is_one_machine = self.is_rank and self.environ["LOCAL_WORLD_SIZE"] == self.environ["WORLD_SIZE"]
        if not is_one_machine:
            return None
        # Of ranks that have regrouped another one: a killed rank may have left a half-written entry in the first.
        name = f"{STORE_FILE}-{self._group}" if self._group else STORE_FILE
        return os.path.join(self.environ[JOB_VARIABLE], name)  # noqa: PTH118 - a text

    @property
    def attempt(self) -> int:
        return int(self.environ.get(RESTART_VARIABLE, 0)) if self.is_rank else 0

    @property
    def stop_signal(self) -> int | None:
        if not self.is_rank:
            return None
        try:
            number = Path(self.environ[JOB_VARIABLE], STOP_FILE).read_text()
        except FileNotFoundError:
            return None
        return int(number) if number else None  # empty while it is being written

    @property
    def has_lost_rank(self) -> bool:
        return self.is_rank and Path(self.environ[JOB_VARIABLE], f"{REGROUP_FILE}-{self._group}").exists()

    @property
    def _group(self) -> int:
        """Number of groups of ranks before that of this one, see ``launch.elastic``."""
        return self._in_rank(GROUP_VARIABLE, 0) if GROUP_VARIABLE in self.environ else 0

    @property
    def num_started(self) -> int:
        return self._in_rank(STARTED_VARIABLE if STARTED_VARIABLE in self.environ else "WORLD_SIZE", 1)

    def validate(self, *, num_devices: int, num_nodes: int) -> None:
        if self.is_rank:
            self._check_size(num_devices, num_nodes)
        elif num_nodes > 1:
            self._check_machines(num_nodes)

    def _in_rank(self, name: str, otherwise: int) -> int:
        return int(self.environ[name]) if self.is_rank else otherwise

    def _check_size(self, num_devices: int, num_nodes: int) -> None:
        if (started := self.num_started) != num_devices * num_nodes:
            raise ClusterError(
                f"this rank is one of {started} that dstrat has started, and the script now asks for "
                f"devices={num_devices}, num_nodes={num_nodes}: ask for the same in each fit, validate, test and "
                "predict of a script. Another size is possible in a program of its own, or after a run with a strategy "
                "that runs only the function in its ranks (start_method='spawn')"
            )

    def _check_machines(self, num_nodes: int) -> None:
        variables = Variables(environ=self.environ, hint=_HINT)
        variables.text("MASTER_ADDR")
        variables.port()
        if (node_rank := variables.integer("NODE_RANK")) >= num_nodes:
            raise ClusterError(
                f"NODE_RANK is {node_rank}, and the machines of num_nodes={num_nodes} are 0 to {num_nodes - 1}"
            )
