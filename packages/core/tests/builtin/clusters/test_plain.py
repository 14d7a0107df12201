"""Ranks in plain environment variables."""

import pytest

from dstrat.builtin.clusters.plain import PlainEnvironment
from dstrat.errors import ClusterError

SECOND_OF_TWO = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "12345",
}


def refusal(environ, *, num_devices=2, num_nodes=1):
    with pytest.raises(ClusterError) as caught:
        PlainEnvironment(environ).validate(num_devices=num_devices, num_nodes=num_nodes)
    return str(caught.value)


def test_reads_ranks_and_the_meeting_point():
    cluster = PlainEnvironment(SECOND_OF_TWO)
    cluster.validate(num_devices=2, num_nodes=1)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (2, 1, 1, 0)
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 12345)
    assert cluster.creates_processes_externally


def test_rank_and_world_size_together_are_the_evidence():
    assert PlainEnvironment.evidence(SECOND_OF_TWO) == "RANK and WORLD_SIZE are set"
    assert PlainEnvironment.evidence({"RANK": "0"}) is None
    assert PlainEnvironment.evidence({"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"}) is None


def test_reads_nothing_but_what_it_is_given(monkeypatch):
    for name in SECOND_OF_TWO:
        monkeypatch.setenv(name, "7")
    environ = dict(SECOND_OF_TWO)
    PlainEnvironment(environ).validate(num_devices=2, num_nodes=1)
    assert PlainEnvironment(environ).global_rank == 1
    assert environ == SECOND_OF_TWO


@pytest.mark.parametrize("name", sorted(SECOND_OF_TWO))
def test_a_missing_variable_is_named(name):
    environ = {key: value for key, value in SECOND_OF_TWO.items() if key != name}
    assert refusal(environ).startswith(f"{name} is not set: set RANK, WORLD_SIZE")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["two", "-1", "1.0", "1_0", "٢", " 1", "9" * 5000])
def test_a_value_that_is_no_whole_number_is_shown(name, value):
    assert refusal({**SECOND_OF_TWO, name: value}).startswith(f"{name} is {value!r}, and must be a whole number from")


@pytest.mark.parametrize("name", ["WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_nothing_where_there_must_be_something_is_refused(name):
    message = refusal({**SECOND_OF_TWO, name: "0"})
    assert message.startswith(f"{name} is '0', and must be a whole number from 1 upwards")


def test_an_empty_variable_counts_as_missing():
    assert refusal({**SECOND_OF_TWO, "MASTER_ADDR": ""}).startswith("MASTER_ADDR is ''")


def test_a_world_of_another_size_is_refused():
    assert refusal(SECOND_OF_TWO, num_devices=4) == (
        "WORLD_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with WORLD_SIZE=4, RANK from 0 to 3 "
        "and LOCAL_RANK from 0 to 3, or pass the devices and num_nodes that were started"
    )


def test_a_rank_outside_the_world_is_refused():
    assert refusal({**SECOND_OF_TWO, "RANK": "3"}).startswith("RANK is 3, and the ranks of 2 go from 0 to 1")


def test_two_ranks_on_one_device_are_refused():
    message = refusal({**SECOND_OF_TWO, "LOCAL_RANK": "0"})
    assert message.startswith("RANK is 1 and LOCAL_RANK is 0, and ranks must be counted machine by machine, 2 on each")


def test_a_local_rank_without_a_device_is_refused():
    environ = {**SECOND_OF_TWO, "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "3", "NODE_RANK": "0"}
    assert refusal(environ, num_nodes=2).startswith("LOCAL_RANK is 3, and the ranks of 2 go from 0 to 1")


def test_a_port_that_cannot_be_is_refused():
    assert "ports end at 65535" in refusal({**SECOND_OF_TWO, "MASTER_PORT": "65536"})


@pytest.mark.parametrize("extra", [{"NODE_RANK": "1"}, {"LOCAL_WORLD_SIZE": "2"}])
def test_several_machines_are_told_apart(extra):
    cluster = PlainEnvironment({**SECOND_OF_TWO, "WORLD_SIZE": "4", "RANK": "3", **extra})
    cluster.validate(num_devices=2, num_nodes=2)
    assert cluster.node_rank == 1


def test_several_machines_without_a_node_rank_are_refused_on_each_of_them():
    for rank in "0", "2":
        environ = {**SECOND_OF_TWO, "WORLD_SIZE": "4", "RANK": rank, "LOCAL_RANK": "0"}
        assert refusal(environ, num_nodes=2).startswith("NODE_RANK is not set, and num_nodes=2 needs it")


def test_a_node_rank_outside_the_machines_is_refused():
    environ = {**SECOND_OF_TWO, "WORLD_SIZE": "4", "RANK": "3", "NODE_RANK": "2"}
    assert refusal(environ, num_nodes=2).startswith("NODE_RANK is 2, and the ranks of 2 go from 0 to 1")
