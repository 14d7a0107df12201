"""Base class of cluster environments whose processes exist already."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dstrat.builtin.clusters.environ import Variables
from dstrat.errors import ClusterError
from dstrat.interfaces.cluster import ClusterEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNames:
    """Names of an environment's variables for ranks and sizes.

    Attributes:
        world_size: Number of processes of the job.
        global_rank: Rank of the process in the job.
        local_rank: Rank of the process on its machine.
        local_size: Number of processes on the machine; None if there is no such variable.
        node_rank: Rank of the machine; None if there is no such variable.
    """

    world_size: str
    global_rank: str
    local_rank: str
    local_size: str | None = None
    node_rank: str | None = None


class ExternalEnvironment(ClusterEnvironment):
    """Processes that a scheduler or launcher has started, with their ranks in environment variables.

    A subclass names the variables, and defines its evidence and the command that starts the processes.

    Attributes:
        names: Names of the variables.
        hint: How a user sets the variables, for messages.
    """

    names: RankNames
    hint: ClassVar[str]

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ)
        self.variables = Variables(environ=self.environ, hint=self.hint)

    @abstractmethod
    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        """Return the command that starts one process per device, such as ``"torchrun --nproc-per-node=2"``."""

    @property
    def main_address(self) -> str:
        return self.variables.text("MASTER_ADDR")

    @property
    def main_port(self) -> int:
        return self.variables.port()

    @property
    def world_size(self) -> int:
        return self.variables.integer(self.names.world_size, minimum=1)

    @property
    def global_rank(self) -> int:
        return self.variables.integer(self.names.global_rank)

    @property
    def local_rank(self) -> int:
        return self.variables.integer(self.names.local_rank)

    @property
    def local_size(self) -> int | None:
        """Number of processes on this machine; None if the environment does not have it."""
        name = self.names.local_size
        return self.variables.integer(name, minimum=1) if name and name in self.environ else None

    @property
    def node_rank(self) -> int:
        name = self.names.node_rank
        if name and name in self.environ:
            return self.variables.integer(name)
        if self.local_size is not None:
            return self.global_rank // self.local_size
        return 0

    def validate(self, *, num_devices: int, num_nodes: int) -> None:
        self._check_sizes(num_devices, num_nodes)
        self._check_machines(num_devices, num_nodes)
        self._check_rank(self.names.global_rank, self.global_rank, self.world_size)
        self._check_rank(self.names.local_rank, self.local_rank, num_devices)
        self._check_rank(self.names.node_rank or self.names.global_rank, self.node_rank, num_nodes)
        self.check_address()

    def check_address(self) -> None:
        """Check that the address of rank 0 is known, before processes start.

        Raises:
            ClusterError: A variable is missing.
        """
        _ = self.main_address, self.main_port  # their getters raise

    def _check_sizes(self, num_devices: int, num_nodes: int) -> None:
        for name, running, required in (
            (self.names.world_size, self.world_size, num_devices * num_nodes),
            (self.names.local_size, self.local_size, num_devices),
        ):
            if running not in (required, None):
                raise ClusterError(
                    f"{name} is {running}, and devices={num_devices} with num_nodes={num_nodes} needs {required}: "
                    f"start with {self.start_command(num_devices=num_devices, num_nodes=num_nodes)}, "
                    "or pass the devices and num_nodes that were started"
                )

    def _check_machines(self, num_devices: int, num_nodes: int) -> None:
        names = self.names
        if num_nodes > 1 and names.node_rank and names.node_rank in self.environ:
            return  # with a variable for the machine, ranks may be in any order
        if num_nodes > 1 and self.local_size is None:
            missing = names.node_rank or names.local_size
            raise ClusterError(f"{missing} is not set, and num_nodes={num_nodes} needs it: {self.hint}")
        if self.global_rank % num_devices != self.local_rank:
            raise ClusterError(
                f"{names.global_rank} is {self.global_rank} and {names.local_rank} is {self.local_rank}, and ranks "
                f"must be counted machine by machine, {num_devices} on each: "
                f"start with {self.start_command(num_devices=num_devices, num_nodes=num_nodes)}"
            )

    def _check_rank(self, name: str, rank: int, size: int) -> None:
        if rank >= size:
            raise ClusterError(f"{name} is {rank}, and the ranks of {size} go from 0 to {size - 1}: {self.hint}")
