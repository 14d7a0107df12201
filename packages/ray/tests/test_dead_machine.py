"""A machine of the Ray cluster dies with its rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packages.ray.tests.ray_cluster import two_machines, wait_until
from packages.ray.tests.test_launcher import WAITING

from dstrat.launch.progress import has_ended


@pytest.mark.clusters
@pytest.mark.slow
def test_rank_of_a_dead_machine_is_named(tmp_path):
    with two_machines() as machines:
        folder = tmp_path / "ranks"
        folder.mkdir()
        head = machines.head_node.node_id
        program = subprocess.Popen(
            [sys.executable, "-c", WAITING, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )
        wait_until(lambda: len(list(folder.iterdir())) == 2, "no ranks")
        ranks = [Path(folder, rank).read_text().split() for rank in ("0", "1")]
        dead = next(rank for rank in ranks if rank[5] != head)
        other = next(node for node in machines.worker_nodes if node.node_id == dead[5])
        machines.remove_node(other, allow_graceful=False)
        output = program.communicate(timeout=400)[0]
        assert f"RankFailedError: rank {dead[0]} of 2 failed: the process of rank {dead[0]} on machine" in output
        wait_until(lambda: all(has_ended(int(rank[-1])) for rank in ranks), "ranks are alive")
