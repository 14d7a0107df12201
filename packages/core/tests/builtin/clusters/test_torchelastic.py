"""Processes that torchrun started."""

import json

import pytest
from tests.warm_program import WarmProgram

from dstrat.builtin.clusters.torchelastic import TorchElasticEnvironment
from dstrat.errors import ClusterError

LAST_OF_FOUR = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29400",
}


def test_reads_what_torchrun_sets():
    cluster = TorchElasticEnvironment(LAST_OF_FOUR)
    cluster.validate(num_devices=2, num_nodes=2)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (4, 3, 1, 1)
    assert (cluster.main_address, cluster.main_port) == ("node-a", 29400)


def test_the_run_id_is_the_evidence():
    assert TorchElasticEnvironment.evidence(LAST_OF_FOUR) == "TORCHELASTIC_RUN_ID is set"
    assert TorchElasticEnvironment.evidence({"RANK": "0", "WORLD_SIZE": "1"}) is None


def test_tells_whether_the_agent_serves_the_store_and_which_attempt_this_is():
    cluster = TorchElasticEnvironment(LAST_OF_FOUR)
    assert (cluster.store_is_served, cluster.attempt) == (False, 0)
    environ = {**LAST_OF_FOUR, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    again = TorchElasticEnvironment(environ)
    assert (again.store_is_served, again.attempt) == (True, 2)
    assert not TorchElasticEnvironment({**environ, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_is_served


@pytest.mark.parametrize(("num_devices", "num_nodes", "name"), [(4, 2, "WORLD_SIZE"), (4, 1, "LOCAL_WORLD_SIZE")])
def test_another_number_of_processes_is_refused_with_the_command(num_devices, num_nodes, name):
    with pytest.raises(ClusterError, match=rf"^{name} is .* torchrun --nnodes={num_nodes} --nproc-per-node=4,"):
        TorchElasticEnvironment(LAST_OF_FOUR).validate(num_devices=num_devices, num_nodes=num_nodes)


def test_a_variable_that_was_removed_is_named():
    environ = {key: value for key, value in LAST_OF_FOUR.items() if key != "LOCAL_RANK"}
    with pytest.raises(ClusterError, match=r"^LOCAL_RANK is not set: start the script with torchrun"):
        TorchElasticEnvironment(environ).validate(num_devices=2, num_nodes=2)


def test_torchrun_itself_is_understood(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "from dstrat.builtin.clusters.torchelastic import TorchElasticEnvironment as Environment\n"
        "cluster = Environment(os.environ)\n"
        "cluster.validate(num_devices=2, num_nodes=1)\n"
        "ranks = Environment.evidence(os.environ), cluster.world_size, cluster.local_rank, cluster.node_rank\n"
        "pathlib.Path(sys.argv[1], str(cluster.global_rank)).write_text(json.dumps(ranks))\n"
    )
    (torchrun := tmp_path / "torchrun.py").write_text("from torch.distributed.run import main\nmain()\n")
    WarmProgram(torchrun, "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)).run()
    ranks = [json.loads((tmp_path / rank).read_text()) for rank in "01"]
    assert ranks == [["TORCHELASTIC_RUN_ID is set", 2, 0, 0], ["TORCHELASTIC_RUN_ID is set", 2, 1, 0]]
