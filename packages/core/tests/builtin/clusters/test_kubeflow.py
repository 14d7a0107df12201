"""Pods of a Kubeflow PyTorchJob."""

import pytest

from dstrat.builtin.clusters.kubeflow import KubeflowEnvironment
from dstrat.errors import ClusterError

SECOND_POD = {
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def test_each_pod_is_a_machine_with_one_process():
    cluster = KubeflowEnvironment(SECOND_POD)
    cluster.validate(num_devices=1, num_nodes=2)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (2, 1, 0, 1)
    assert (cluster.main_address, cluster.main_port) == ("job-master-0", 23456)


@pytest.mark.parametrize("name", sorted(SECOND_POD))
def test_evidence_needs_all_variables_of_the_operator(name):
    assert KubeflowEnvironment.evidence(SECOND_POD) is not None
    assert KubeflowEnvironment.evidence({key: value for key, value in SECOND_POD.items() if key != name}) is None


def test_a_local_rank_shows_that_something_else_started_processes_in_the_pod():
    assert KubeflowEnvironment.evidence({**SECOND_POD, "LOCAL_RANK": "0"}) is None


def test_several_devices_in_a_pod_are_torchruns_work():
    with pytest.raises(ClusterError, match=r"WORLD_SIZE is 2, .*torchrun --nnodes=2 --nproc-per-node=4 in each pod"):
        KubeflowEnvironment(SECOND_POD).validate(num_devices=4, num_nodes=2)


def test_devices_that_only_happen_to_multiply_to_the_world_size_are_refused():
    with pytest.raises(ClusterError, match="RANK is 1"):
        KubeflowEnvironment(SECOND_POD).validate(num_devices=2, num_nodes=1)


def test_another_number_of_pods_is_refused():
    with pytest.raises(ClusterError, match=r"WORLD_SIZE is 2, .*a PyTorchJob of 3 replicas"):
        KubeflowEnvironment(SECOND_POD).validate(num_devices=1, num_nodes=3)
