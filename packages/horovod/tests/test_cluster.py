"""The cluster environment of horovodrun, with dictionaries for the environment."""

import pytest

from dstrat.errors import ClusterError
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster
from dstrat_horovod import HorovodEnvironment

pytestmark = pytest.mark.without_horovod


def environ(rank=1, size=4, local_size=2, **more):
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank % local_size),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_CROSS_RANK": str(rank // local_size),
        "HOROVOD_CROSS_SIZE": str(size // local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "29123",
        **more,
    }


def test_ranks_of_two_machines_are_read():
    cluster = HorovodEnvironment(environ(rank=3, MASTER_ADDR="first"))
    assert (cluster.global_rank, cluster.local_rank, cluster.node_rank, cluster.world_size) == (3, 1, 1, 4)
    assert cluster.main_address == "first"
    cluster.validate(num_devices=2, num_nodes=2)


def test_processes_of_one_job_compute_the_same_port_on_the_loopback():
    clusters = [HorovodEnvironment(environ(rank, size=2)) for rank in range(2)]
    assert {cluster.main_address for cluster in clusters} == {"127.0.0.1"}
    [port] = {cluster.main_port for cluster in clusters}
    assert 15000 <= port < 30000
    assert HorovodEnvironment(environ(MASTER_PORT="1234")).main_port == 1234


def test_the_port_is_never_that_of_horovodruns_rendezvous():
    for port in range(1024, 65536):
        assert HorovodEnvironment(environ(HOROVOD_GLOO_RENDEZVOUS_PORT=str(port))).main_port != port


def test_on_several_machines_the_first_must_be_named():
    with pytest.raises(ClusterError, match="MASTER_ADDR is not set, and HOROVOD_LOCAL_SIZE is 2 of 4 processes"):
        HorovodEnvironment(environ()).validate(num_devices=2, num_nodes=2)


def test_another_number_of_devices_is_refused_with_the_command():
    with pytest.raises(ClusterError) as refused:
        HorovodEnvironment(environ(size=2)).validate(num_devices=4, num_nodes=1)
    assert "HOROVOD_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with horovodrun -np 4" in str(
        refused.value
    )


def test_it_is_chosen_by_its_evidence_and_dstrats_own_ranks_inside_it_first():
    chosen = choose_cluster(None, get_catalog(), environ(size=2))
    assert (chosen.name, chosen.reason) == ("horovodrun", "HOROVOD_RANK is set")
    inside = environ(size=2) | {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert choose_cluster(None, get_catalog(), inside).name == "torchelastic"
