"""Whatever happened to the variables of a job, there is the right answer or a ClusterError."""

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrat.builtin.clusters.kubeflow import KubeflowEnvironment
from dstrat.builtin.clusters.lsf import LSFEnvironment
from dstrat.builtin.clusters.mpi import MPIEnvironment
from dstrat.builtin.clusters.plain import PlainEnvironment
from dstrat.builtin.clusters.slurm import SLURMEnvironment
from dstrat.builtin.clusters.torchelastic import TorchElasticEnvironment
from dstrat.errors import ClusterError, RequestError

NAMES = {  # under which each keeps what `started` lists; "" where it has no such variable
    KubeflowEnvironment: ["WORLD_SIZE", "RANK"],
    LSFEnvironment: [f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    MPIEnvironment: [f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")],
    PlainEnvironment: ["WORLD_SIZE", "RANK", "LOCAL_RANK", "", "NODE_RANK"],
    SLURMEnvironment: ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_NNODES"],
    TorchElasticEnvironment: ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"],
}
ALWAYS = {
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "LSB_JOBID": "1",
    "LSB_MCPU_HOSTS": "launch 1 a 4 b 4 c 4",
}
JUNK = ["", "0", "1", "2", "7", "-1", "x", "1.5", "9" * 30, "n[", "a b", "3,1", "/no/such/file"]
PROPERTIES = ["world_size", "global_rank", "local_rank", "node_rank", "main_port", "attempt", "listening_socket"]


def started(environment, num_devices, num_nodes, rank):
    """The variables of one rank of a job with one process per device."""
    node_rank, local_rank = divmod(rank, num_devices)
    values = (num_devices * num_nodes, rank, local_rank, num_devices, node_rank, num_nodes)
    named = zip(NAMES[environment], values, strict=False)
    return {**ALWAYS, **{name: str(value) for name, value in named if name}}


@st.composite
def jobs(draw):
    num_nodes = draw(st.integers(1, 3))
    environment = draw(st.sampled_from(list(NAMES)))
    num_devices = 1 if environment is KubeflowEnvironment else draw(st.integers(1, 4))
    rank = draw(st.integers(0, num_devices * num_nodes - 1))
    return environment, num_devices, num_nodes, rank


@given(job=jobs())
def test_every_rank_of_every_job_is_understood(job):
    environment, num_devices, num_nodes, rank = job
    cluster = environment(started(*job))
    cluster.validate(num_devices=num_devices, num_nodes=num_nodes)
    assert (cluster.world_size, cluster.global_rank) == (num_devices * num_nodes, rank)
    assert (cluster.node_rank, cluster.local_rank) == divmod(rank, num_devices)
    assert cluster.main_port == 29500


@given(job=jobs(), data=st.data())
def test_damaged_variables_are_a_cluster_error_or_change_nothing_that_matters(job, data):
    environment, num_devices, num_nodes, _ = job
    environ = started(*job)
    for name in data.draw(st.lists(st.sampled_from(sorted(environ)), max_size=3)):
        environ[name] = data.draw(st.sampled_from(JUNK))
    for name in data.draw(st.lists(st.sampled_from(sorted(environ)), max_size=2)):
        environ.pop(name, None)
    before = dict(environ)
    cluster = environment(environ)
    environment.evidence(environ)
    for name in PROPERTIES:
        with contextlib.suppress(ClusterError):
            getattr(cluster, name)
    try:
        cluster.validate(num_devices=num_devices, num_nodes=num_nodes)
    except ClusterError as error:
        assert "\n" not in str(error)  # noqa: PT017 - whether there is an error is what is drawn
    else:
        assert cluster.world_size == num_devices * num_nodes
        assert cluster.global_rank < cluster.world_size
        assert cluster.local_rank < num_devices
        assert cluster.node_rank < num_nodes
        assert 0 < cluster.main_port < 65536
    assert environ == before


@pytest.mark.parametrize("environment", list(NAMES))
def test_the_variables_are_those_of_the_process_unless_others_are_passed(environment):
    assert environment().environ is os.environ
    with pytest.raises(RequestError, match=rf"{environment.__name__}\(False\) takes environment variables, such as"):
        environment(False)


@pytest.mark.parametrize("environment", list(NAMES))
def test_every_other_number_of_devices_or_machines_is_refused(environment):
    cluster = environment(started(environment, 1, 2, 1))
    cluster.validate(num_devices=1, num_nodes=2)
    for num_devices, num_nodes in [(1, 1), (2, 1), (2, 2), (1, 3)]:
        with pytest.raises(ClusterError):
            cluster.validate(num_devices=num_devices, num_nodes=num_nodes)
