"""Cluster environment of processes that mpirun or mpiexec started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import port_of_job
from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames
from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_OPEN_MPI = RankNames(
    world_size="OMPI_COMM_WORLD_SIZE",
    global_rank="OMPI_COMM_WORLD_RANK",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = RankNames(  # MPICH, Intel MPI; under srun --mpi=pmi2 the PMI_ ones are there without the MPI_ ones
    world_size="PMI_SIZE", global_rank="PMI_RANK", local_rank="MPI_LOCALRANKID", local_size="MPI_LOCALNRANKS"
)
# Jobs of the same machine get different ports.
_JOB_NUMBERS = ("OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
_DEFAULT_PORT = 29500  # torch's own


class MPIEnvironment(ExternalEnvironment):
    """Ranks of mpirun, from Open MPI or MPICH and its derivatives; MPI itself is not used.

    mpirun does not set the address of rank 0: on several machines ``MASTER_ADDR`` must be set.
    """

    hint = "start the script with mpirun"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        for names in (_OPEN_MPI, _HYDRA):
            if names.global_rank in environ and names.local_rank in environ:
                return f"{names.global_rank} is set"
        return None

    @property
    def names(self) -> RankNames:  # type: ignore[override]  # here the variables show which names they have
        return _OPEN_MPI if _OPEN_MPI.global_rank in self.environ else _HYDRA

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        per_node = "-ppn" if self.names is _HYDRA else "-N"
        return f"mpirun -n {num_devices * num_nodes} {per_node} {num_devices}"

    @property
    def main_address(self) -> str:
        if self.environ.get("MASTER_ADDR"):
            return self.environ["MASTER_ADDR"]
        if self.local_size == self.world_size:
            return "127.0.0.1"
        passing_on = "-genv MASTER_ADDR HOST" if self.names is _HYDRA else "-x MASTER_ADDR=HOST"
        raise ClusterError(
            f"MASTER_ADDR is not set, and {self.names.local_size} is {self.local_size} "
            f"of {self.world_size} processes, so rank 0 may be on another machine: "
            f"start with mpirun {passing_on}, where HOST is the first machine"
        )

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in self.environ:
            return self.variables.port()
        numbers = [self.environ[name] for name in _JOB_NUMBERS if self.environ.get(name)]
        return port_of_job(numbers[0]) if numbers else _DEFAULT_PORT
