"""Cluster environment of tasks that LSF's job step manager (jsrun) started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import port_of_job
from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames
from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping


class LSFEnvironment(ExternalEnvironment):
    """One task that jsrun started.

    Processes of mpirun within LSF belong to the environment ``mpi``; python without either is no task.
    """

    names = RankNames(
        world_size="JSM_NAMESPACE_SIZE",
        global_rank="JSM_NAMESPACE_RANK",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_size="JSM_NAMESPACE_LOCAL_SIZE",
    )
    hint = "start the script with jsrun in a job of LSF"

    restart_option = "bsub -r"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "JSM_NAMESPACE_RANK is set" if "JSM_NAMESPACE_RANK" in environ else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        return f"jsrun --nrs={num_devices * num_nodes} --rs_per_host={num_devices} --tasks_per_rs=1"

    @property
    def main_address(self) -> str:
        if self.environ.get("MASTER_ADDR"):
            return self.environ["MASTER_ADDR"]
        if self.local_size == self.world_size:
            return "127.0.0.1"
        return _first_compute_host(self._slots)

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in self.environ:
            return self.variables.port()
        return port_of_job(self.variables.text("LSB_JOBID"))

    @property
    def job_id(self) -> str | None:
        number = self.environ.get("LSB_JOBID")
        return f"lsf-{number}" if number else None

    @property
    def _slots(self) -> list[str]:
        """The job's hosts, each as often as it has slots."""
        if self.environ.get("LSB_DJOB_RANKFILE"):
            return _read_rank_file(Path(self.environ["LSB_DJOB_RANKFILE"]))
        fields = self.variables.text("LSB_MCPU_HOSTS").split()
        hosts, counts = fields[::2], fields[1::2]
        if len(hosts) != len(counts) or not all(count.isdecimal() and len(count) < 7 for count in counts):
            raise ClusterError(
                f"LSB_MCPU_HOSTS is {' '.join(fields)!r}, and must be hosts and their slots in turn: "
                "set MASTER_ADDR to the machine of rank 0"
            )
        return [host for host, count in zip(hosts, counts, strict=True) for _ in range(int(count))]


def _read_rank_file(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"LSB_DJOB_RANKFILE is {str(path)!r}, which cannot be read ({error}): "
            "set MASTER_ADDR to the machine of rank 0"
        ) from error


def _first_compute_host(slots: list[str]) -> str:
    """Return the first host after the launch node, which LSF lists first with a single slot."""
    hosts = list(dict.fromkeys(slots))
    if len(hosts) > 1 and slots.count(hosts[0]) == 1 and any(slots.count(host) > 1 for host in hosts[1:]):
        return hosts[1]
    if hosts:
        return hosts[0]
    raise ClusterError("LSF's list of hosts is empty: set MASTER_ADDR to the machine of rank 0")
