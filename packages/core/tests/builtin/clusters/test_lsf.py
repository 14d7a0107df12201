"""Tasks that LSF's jsrun started."""

import pytest

from dstrat.builtin.clusters.lsf import LSFEnvironment
from dstrat.errors import ClusterError

LAST_OF_FOUR = {
    "LSB_JOBID": "1234",
    "LSB_MCPU_HOSTS": "batch1 1 node-a 42 node-b 42",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
}


def refusal(environ, *, num_devices=2, num_nodes=2):
    with pytest.raises(ClusterError) as caught:
        LSFEnvironment(environ).validate(num_devices=num_devices, num_nodes=num_nodes)
    return str(caught.value)


def test_reads_the_ranks_of_a_task():
    cluster = LSFEnvironment(LAST_OF_FOUR)
    cluster.validate(num_devices=2, num_nodes=2)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (4, 3, 1, 1)


def test_the_step_manager_is_the_evidence_and_the_job_alone_is_not():
    assert LSFEnvironment.evidence(LAST_OF_FOUR) == "JSM_NAMESPACE_RANK is set"
    assert LSFEnvironment.evidence({"LSB_JOBID": "1234", "LSB_MCPU_HOSTS": "a 4"}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("batch1 1 node-a 42 node-b 42", "node-a"),
        ("node-a 2 node-b 2", "node-a"),
        ("node-a 1 node-b 1", "node-a"),
        ("node-a 42", "node-a"),
    ],
)
def test_rank_0_is_on_the_first_machine_that_computes(hosts, first):
    assert LSFEnvironment({**LAST_OF_FOUR, "LSB_MCPU_HOSTS": hosts}).main_address == first


def test_a_rank_file_comes_first(tmp_path):
    (tmp_path / "ranks").write_text("batch1\nnode-x\nnode-x\nnode-y\nnode-y\n")
    environ = {**LAST_OF_FOUR, "LSB_DJOB_RANKFILE": str(tmp_path / "ranks")}
    assert LSFEnvironment(environ).main_address == "node-x"


def test_one_machine_needs_no_name():
    environ = {**LAST_OF_FOUR, "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"}
    cluster = LSFEnvironment(environ)
    cluster.validate(num_devices=2, num_nodes=1)
    assert cluster.main_address == "127.0.0.1"


def test_the_port_follows_from_the_job_and_can_be_set():
    assert LSFEnvironment(LAST_OF_FOUR).main_port == 16234
    assert LSFEnvironment({**LAST_OF_FOUR, "MASTER_PORT": "5000"}).main_port == 5000
    assert LSFEnvironment({**LAST_OF_FOUR, "MASTER_ADDR": "10.0.0.1"}).main_address == "10.0.0.1"


def test_a_wrong_number_of_tasks_is_refused_with_the_command():
    assert "start with jsrun --nrs=8 --rs_per_host=4 --tasks_per_rs=1" in refusal(LAST_OF_FOUR, num_devices=4)


def test_ranks_that_are_dealt_out_in_turn_are_refused():
    environ = {**LAST_OF_FOUR, "JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"}
    assert "ranks must be counted machine by machine" in refusal(environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"LSB_MCPU_HOSTS": "node-a"}, "LSB_MCPU_HOSTS is 'node-a', and must be hosts and their slots in turn"),
        ({"LSB_MCPU_HOSTS": "node-a many"}, "must be hosts and their slots in turn"),
        ({"LSB_MCPU_HOSTS": "node-a 0"}, "LSF's list of hosts is empty: set MASTER_ADDR"),
        ({"LSB_MCPU_HOSTS": ""}, "LSB_MCPU_HOSTS is ''"),
        ({"LSB_DJOB_RANKFILE": "/no/such/file"}, "LSB_DJOB_RANKFILE is '/no/such/file', which cannot be read"),
        ({"JSM_NAMESPACE_SIZE": "x"}, "JSM_NAMESPACE_SIZE is 'x'"),
        ({"LSB_JOBID": ""}, "LSB_JOBID is ''"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(change, message):
    assert message in refusal({**LAST_OF_FOUR, **change})


def test_several_machines_need_the_local_size():
    environ = {name: value for name, value in LAST_OF_FOUR.items() if name != "JSM_NAMESPACE_LOCAL_SIZE"}
    assert refusal(environ).startswith("JSM_NAMESPACE_LOCAL_SIZE is not set, and num_nodes=2 needs it")
