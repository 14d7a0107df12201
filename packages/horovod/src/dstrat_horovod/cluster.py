"""Cluster environment of processes that horovodrun started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import port_of_job
from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames
from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


class HorovodEnvironment(ExternalEnvironment):
    """Ranks of horovodrun with its Gloo controller, for every strategy.

    horovodrun has the address of its own rendezvous only, which may be on another machine than rank 0: on several
    machines ``MASTER_ADDR`` must be set.
    """

    names = RankNames(
        world_size="HOROVOD_SIZE",
        global_rank="HOROVOD_RANK",
        local_rank="HOROVOD_LOCAL_RANK",
        local_size="HOROVOD_LOCAL_SIZE",
        node_rank="HOROVOD_CROSS_RANK",
    )
    hint = "start the script with horovodrun"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "HOROVOD_RANK is set" if "HOROVOD_RANK" in environ and "HOROVOD_LOCAL_RANK" in environ else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        hosts = ",".join(f"HOST{number}:{num_devices}" for number in range(1, num_nodes + 1))
        return f"horovodrun -np {num_devices * num_nodes}" + (f" -H {hosts}" if num_nodes > 1 else "")

    @property
    def main_address(self) -> str:
        if self.environ.get("MASTER_ADDR"):
            return self.environ["MASTER_ADDR"]
        if self.local_size == self.world_size:
            return "127.0.0.1"
        raise ClusterError(
            f"MASTER_ADDR is not set, and HOROVOD_LOCAL_SIZE is {self.local_size} of {self.world_size} processes, so "
            "rank 0 may be on another machine: start with MASTER_ADDR=HOST horovodrun ..., where HOST is the first "
            "machine"
        )

    @property
    def main_port(self) -> int:
        """Port on which global rank 0 listens, the same in all processes of a job: ``MASTER_PORT``, or computed."""
        if "MASTER_PORT" in self.environ:
            return self.variables.port()
        # As step 1: the port of step 0 is that of horovodrun's rendezvous itself, where that is in the same range.
        return port_of_job(self.variables.text(_RENDEZVOUS_PORT), "1")
