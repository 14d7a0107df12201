"""Processes that mpirun started, of Open MPI or of MPICH."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dstrat.builtin.clusters.mpi import MPIEnvironment
from dstrat.errors import ClusterError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1899560961",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TWO_MACHINES = {
    **OPEN_MPI,
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
}


def refusal(environ, *, num_devices=2, num_nodes=1):
    with pytest.raises(ClusterError) as caught:
        MPIEnvironment(environ).validate(num_devices=num_devices, num_nodes=num_nodes)
    return str(caught.value)


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH])
def test_one_machine_needs_nothing_but_mpirun(environ):
    cluster = MPIEnvironment(environ)
    cluster.validate(num_devices=2, num_nodes=1)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (2, 1, 1, 0)
    assert cluster.main_address == "127.0.0.1"


def test_ranks_with_local_ranks_are_the_evidence():
    assert MPIEnvironment.evidence(OPEN_MPI) == "OMPI_COMM_WORLD_RANK is set"
    assert MPIEnvironment.evidence(MPICH) == "PMI_RANK is set"
    assert MPIEnvironment.evidence({}) is None


def test_a_task_of_srun_that_offers_pmi_is_not_mpiruns():
    assert MPIEnvironment.evidence({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_STEP_ID": "2"}) is None


def test_the_port_follows_from_the_job_and_can_be_set():
    assert MPIEnvironment(OPEN_MPI).main_port == 15000 + 1899560961 % 15000
    assert MPIEnvironment({**MPICH, "SLURM_JOB_ID": "7"}).main_port == 15007
    assert MPIEnvironment(MPICH).main_port == 29500
    assert MPIEnvironment({**OPEN_MPI, "MASTER_PORT": "5000"}).main_port == 5000


def test_several_machines_need_the_address_of_the_first():
    assert refusal(TWO_MACHINES, num_nodes=2) == (
        "MASTER_ADDR is not set, and OMPI_COMM_WORLD_LOCAL_SIZE is 2 of 4 processes, so rank 0 may be on another "
        "machine: start with mpirun -x MASTER_ADDR=HOST, where HOST is the first machine"
    )
    assert "mpirun -genv MASTER_ADDR HOST" in refusal({**MPICH, "PMI_RANK": "3", "PMI_SIZE": "4"}, num_nodes=2)
    cluster = MPIEnvironment({**TWO_MACHINES, "MASTER_ADDR": "node-a"})
    cluster.validate(num_devices=2, num_nodes=2)
    assert (cluster.main_address, cluster.node_rank) == ("node-a", 1)


def test_ranks_that_are_dealt_out_in_turn_are_refused():
    environ = {**TWO_MACHINES, "OMPI_COMM_WORLD_RANK": "2", "MASTER_ADDR": "node-a"}
    assert "ranks must be counted machine by machine, 2 on each: start with mpirun -n 4 -N 2" in refusal(
        environ, num_nodes=2
    )


def test_a_wrong_number_of_processes_is_refused_with_the_command():
    assert "OMPI_COMM_WORLD_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with mpirun -n 4 -N 4" in refusal(
        OPEN_MPI, num_devices=4
    )
    assert "PMI_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with mpirun -n 4 -ppn 4" in refusal(
        MPICH, num_devices=4
    )


def test_a_missing_variable_is_named():
    assert refusal({"OMPI_COMM_WORLD_RANK": "0"}).startswith("OMPI_COMM_WORLD_SIZE is not set: start the script with")


@pytest.mark.parametrize("command", ["mpirun", "mpiexec.hydra"])
def test_a_real_mpirun_is_understood(command, tmp_path):
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed")
    script = tmp_path / "ranks.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "from dstrat.builtin.clusters.mpi import MPIEnvironment as Environment\n"
        "cluster = Environment(os.environ)\n"
        "cluster.validate(num_devices=2, num_nodes=1)\n"
        "found = Environment.evidence(os.environ) is not None, cluster.world_size, cluster.local_rank\n"
        "found += cluster.node_rank, cluster.main_address, cluster.main_port\n"
        "pathlib.Path(sys.argv[1], str(cluster.global_rank)).write_text(json.dumps(found))\n"
    )
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "SLURM_"))}
    subprocess.run(
        [command, "-n", "2", sys.executable, script, tmp_path],
        env={**inherited, **as_root, "OMPI_MCA_rmaps_base_oversubscribe": "1"},
        check=True,
        timeout=300,
        capture_output=True,
    )
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first[:5] == [True, 2, 0, 0, "127.0.0.1"]
    assert second[:5] == [True, 2, 1, 0, "127.0.0.1"]
    assert first[5] == second[5]
