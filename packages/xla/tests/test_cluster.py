"""The cluster environment of TPU pods."""

from __future__ import annotations

import pytest

from dstrat.errors import ClusterError
from dstrat_xla.cluster import XLAEnvironment

POD = {"TPU_WORKER_HOSTNAMES": "host-a,host-b", "TPU_WORKER_ID": "1"}

pytestmark = pytest.mark.without_torch_xla


def test_a_pod_is_known_by_its_hosts():
    assert XLAEnvironment.evidence(POD) == "TPU_WORKER_HOSTNAMES has 2 hosts"
    assert XLAEnvironment.evidence({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None
    assert XLAEnvironment.evidence({}) is None


def test_ranks_meet_on_the_first_host():
    pod = XLAEnvironment(POD)
    assert (pod.main_address, pod.main_port, pod.node_rank) == ("host-a", 29500, 1)
    assert XLAEnvironment({**POD, "MASTER_PORT": "1234"}).main_port == 1234
    assert not pod.creates_processes_externally


@pytest.mark.parametrize(
    ("environ", "num_nodes", "message"),
    [
        (POD, 1, "has 2 hosts, and num_nodes is 1: pass num_nodes=2"),
        ({**POD, "TPU_WORKER_ID": "2"}, 2, "TPU_WORKER_ID is 2, and the hosts are 0 to 1"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, 2, "TPU_WORKER_ID is not set"),
    ],
)
def test_a_pod_that_contradicts_the_request_is_an_error(environ, num_nodes, message):
    with pytest.raises(ClusterError, match=message):
        XLAEnvironment(environ).validate(num_devices=4, num_nodes=num_nodes)
