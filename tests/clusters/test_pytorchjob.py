"""Processes with the variables that Kubeflow's training operator sets in the pods of a PyTorchJob."""

import os
import subprocess

import pytest
from tests.clusters import checks
from tests.clusters.checks import JOB, PYTHON

pytestmark = [pytest.mark.clusters, pytest.mark.slow]


def start_pods(folder, *arguments, num_pods=2):
    port = checks.free_port()
    of_job = {
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",
        "WORLD_SIZE": str(num_pods),
        # For torchrun, which the pods here do not use.
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(port),
        "PET_NNODES": str(num_pods),
        "PET_NPROC_PER_NODE": "auto",
    }
    command = [PYTHON, str(JOB), str(folder), f"--num-nodes={num_pods}", *arguments]
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **of_job, "RANK": str(rank), "PET_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_pods)
    ]


def test_pods_train(tmp_path, expected):
    pods = start_pods(tmp_path / "job")
    printed = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], printed
    assert [out for out, _ in printed] == ["trained 12 steps\n", ""]
    assert checks.ranks(tmp_path / "job") == [(0, 0, 0), (1, 0, 1)]
    checks.check_losses(tmp_path / "job", expected)
    checks.check_no_survivors(tmp_path / "job")


def test_deleted_pod_ends_the_others_which_name_it(tmp_path):
    pods = start_pods(tmp_path / "job", "--fail=kill")
    printed = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [1, -9]
    assert "rank 1 of 2 has ended already" in printed[0][1]
    checks.check_no_survivors(tmp_path / "job")


def test_replicas_and_num_nodes_must_agree(tmp_path):
    pods = start_pods(tmp_path / "job", "--num-nodes=3")
    printed = [pod.communicate(timeout=120) for pod in pods]
    assert [pod.returncode for pod in pods] == [1, 1]
    for _, err in printed:
        assert "WORLD_SIZE is 2, and devices=1 with num_nodes=3 needs 3: start with a PyTorchJob of 3 replicas" in err
