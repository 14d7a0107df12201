"""Groups of ranks that train apart: division of a job, process groups, and the cluster that a group sees."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.parallel.internals import new_connections
from dstrat.parallel.process_group import wait_for_all_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class Division:
    """Division of a job into groups of consecutive ranks.

    Attributes:
        num_groups: Number of groups.
        size: Number of ranks of each group.
        ranks_per_machine: Number of ranks of each machine.
    """

    num_groups: int
    size: int
    ranks_per_machine: int

    @property
    def local_size(self) -> int:
        """Number of ranks that a group has on a machine."""
        return min(self.size, self.ranks_per_machine)


def divide(groups: int | None, *, world_size: int, ranks_per_machine: int) -> Division:
    """Return the division of a job: the requested one, or a group for each machine, or for each rank of a single one.

    Args:
        groups: Requested number of groups; None for the default.
        world_size: Number of ranks of the job.
        ranks_per_machine: Number of ranks of each machine.

    Raises:
        RequestError: The groups cannot have equal numbers of ranks, or their borders are not those of machines.
    """
    machines = max(1, world_size // ranks_per_machine)
    num_groups = groups or (machines if machines > 1 else world_size)
    if world_size % num_groups:
        raise RequestError(
            f"groups={groups!r} does not divide the {world_size} ranks of the job: give a number that does, "
            "as all groups have as many ranks"
        )
    size = world_size // num_groups
    if size % ranks_per_machine and ranks_per_machine % size:
        raise RequestError(
            f"groups={groups!r} are of {size} ranks each, and a machine has {ranks_per_machine}: a group must consist "
            "of whole machines, or several groups of a whole machine"
        )
    return Division(num_groups=num_groups, size=size, ranks_per_machine=ranks_per_machine)


class GroupEnvironment(ClusterEnvironment):
    """Cluster environment of a group, of which an inner strategy takes its ranks and sizes.

    Args:
        job: Cluster environment of the job.
        division: Its groups.
    """

    def __init__(self, job: ClusterEnvironment, division: Division) -> None:
        super().__init__(job.environ)
        self._job, self._division = job, division

    @override
    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return None  # it is never chosen

    @property
    def main_address(self) -> str:
        return self._job.main_address

    @property
    def main_port(self) -> int:
        return self._job.main_port

    @property
    def world_size(self) -> int:
        return self._division.size

    @property
    def global_rank(self) -> int:
        return self._job.global_rank % self._division.size

    @property
    def local_rank(self) -> int:
        return self._job.local_rank % self._division.local_size

    @property
    def node_rank(self) -> int:
        return self.global_rank // self._division.ranks_per_machine

    @property
    def stop_signal(self) -> int | None:
        return self._job.stop_signal

    @property
    def attempt(self) -> int:
        return self._job.attempt


class RankGroups:
    """Process groups of this rank: the job, its group, and its peers, which have the same rank in the other groups.

    Args:
        division: The groups of the job.
        backend: Backend of the new process groups.
        timeout: How long a collective waits for the other ranks.

    Attributes:
        division: The groups of the job.
        index: Number of this rank's group.
        rank: Rank in the group.
        job: Process group of all ranks.
        group: Process group of the group.
        peers: Process group of the peers, in the order of their groups.
    """

    def __init__(self, division: Division, *, backend: str | None, timeout: timedelta) -> None:
        job = dist.group.WORLD
        assert job is not None  # noqa: S101 - the strategy has opened it
        self.division, self.job = division, job
        self.index, self.rank = divmod(dist.get_rank(), division.size)
        groups, size = range(division.num_groups), division.size
        # Other groups wait longer: a rank that hangs is named by those of its group, which hang for it.
        longer = 1.5 * timeout if size > 1 else timeout
        # Each rank takes part in the opening of all of them, in the same order.
        with new_connections():
            by_group = [dist.new_group([g * size + r for r in range(size)], timeout, backend) for g in groups]
            by_rank = [dist.new_group([g * size + r for g in groups], longer, backend) for r in range(size)]
        self.group, self.peers = by_group[self.index], by_rank[self.rank]
        wait_for_all_ranks("open the groups of ranks")  # Gloo fails in a rank that still connects when another closes

    @contextmanager
    def as_default(self, group: dist.ProcessGroup) -> Iterator[None]:
        """Let torch.distributed take a group for the default one, for code that knows no other."""
        previous = dist.group.WORLD
        dist.group.WORLD = group
        try:
            yield
        finally:
            if dist.group.WORLD is group:  # else everything was closed meanwhile
                dist.group.WORLD = previous
