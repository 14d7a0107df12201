"""The cluster environment of jobs that dstrat starts itself."""

import os
import pickle

import pytest

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import ClusterError

RANK = {
    "DSTRAT_JOB": "/tmp/dstrat-job-x",
    "DSTRAT_RANK_PID": str(os.getpid()),
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "12345",
}
HAND = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "1"}


def test_rank_that_dstrat_has_started_is_recognised():
    assert LocalEnvironment.evidence(RANK) == "dstrat has started this process"
    cluster = LocalEnvironment(RANK)
    assert cluster.creates_processes_externally
    assert (cluster.global_rank, cluster.local_rank, cluster.node_rank, cluster.world_size) == (3, 1, 1, 4)
    assert (cluster.main_address, cluster.main_port, cluster.store_file) == ("127.0.0.1", 12345, None)
    cluster.validate(num_devices=2, num_nodes=2)


def test_process_that_is_no_rank_is_alone_and_may_start_some():
    assert LocalEnvironment.evidence({}) is None
    cluster = LocalEnvironment({})
    assert not cluster.creates_processes_externally
    assert (cluster.global_rank, cluster.local_rank, cluster.node_rank, cluster.world_size) == (0, 0, 0, 1)
    assert (cluster.main_address, cluster.main_port, cluster.store_file) == ("127.0.0.1", 0, None)
    cluster.validate(num_devices=2, num_nodes=1)


def test_process_that_a_rank_has_started_is_no_rank():
    child = {**RANK, "DSTRAT_RANK_PID": "1"}
    assert LocalEnvironment.evidence(child)  # so that nobody else takes RANK and WORLD_SIZE for its own
    cluster = LocalEnvironment(child)
    assert not cluster.creates_processes_externally
    assert (cluster.world_size, cluster.main_port, cluster.store_file) == (1, 0, None)


def test_ranks_of_one_machine_meet_through_a_file_of_the_job():
    assert LocalEnvironment({**RANK, "LOCAL_WORLD_SIZE": "4"}).store_file == "/tmp/dstrat-job-x/store"


def test_ranks_learn_that_the_job_was_asked_to_stop(tmp_path):
    cluster = LocalEnvironment({**RANK, "DSTRAT_JOB": str(tmp_path)})
    assert cluster.stop_signal is None
    (tmp_path / "stop").write_text("15")
    assert cluster.stop_signal == 15
    assert LocalEnvironment({}).stop_signal is None


def test_ranks_that_go_on_without_others_meet_through_another_file(tmp_path):
    ranks = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2", "NODE_RANK": "0"}
    ranks |= {"DSTRAT_NUM_STARTED": "4", "DSTRAT_GROUP": "1", "DSTRAT_RESTART_COUNT": "1"}
    regrouped = {**RANK, **ranks, "DSTRAT_JOB": str(tmp_path)}
    cluster = LocalEnvironment(regrouped)
    assert cluster.store_file == f"{tmp_path}/store-1"
    assert (cluster.world_size, cluster.num_started, cluster.attempt) == (3, 4, 1)
    cluster.validate(num_devices=4, num_nodes=1)  # as the script asks for, which knows nothing of it
    (tmp_path / "regroup-0").touch()
    assert not cluster.has_lost_rank
    (tmp_path / "regroup-1").touch()
    assert cluster.has_lost_rank
    assert LocalEnvironment(RANK).num_started == 4
    assert LocalEnvironment({}).num_started == 1
    assert not LocalEnvironment({}).has_lost_rank


def test_job_of_another_size_than_asked_for_is_refused():
    with pytest.raises(ClusterError, match=r"one of 4 that dstrat has started, and .* devices=2, num_nodes=1"):
        LocalEnvironment(RANK).validate(num_devices=2, num_nodes=1)


def test_several_machines_need_to_know_of_each_other():
    LocalEnvironment(HAND).validate(num_devices=2, num_nodes=2)
    for name in HAND:
        environ = {key: value for key, value in HAND.items() if key != name}
        with pytest.raises(ClusterError, match=f"{name} is not set: with num_nodes above 1, set MASTER_ADDR"):
            LocalEnvironment(environ).validate(num_devices=2, num_nodes=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK is 2, and the machines of num_nodes=2 are 0 to 1"),
        ({"NODE_RANK": "first"}, "NODE_RANK is 'first', and must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999, and ports end at 65535"),
    ],
)
def test_variables_that_make_no_sense_are_named(change, message):
    with pytest.raises(ClusterError, match=message):
        LocalEnvironment({**HAND, **change}).validate(num_devices=2, num_nodes=2)


def test_environment_describes_the_process_that_it_has_travelled_to():
    assert pickle.loads(pickle.dumps(LocalEnvironment())).environ is os.environ
    assert pickle.loads(pickle.dumps(LocalEnvironment(RANK))).global_rank == 3
