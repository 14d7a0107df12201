"""The launcher on a Ray cluster of two machines: ranks, results, failures, and errors for what cannot run."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from packages.ray.tests.ray_cluster import OPTIONS, Line, loader, ray, two_machines, wait_until, weights_of_one_device

from dstrat import Trainer
from dstrat.errors import LaunchError, RankFailedError, RequestError
from dstrat.launch.job import JOB_VARIABLE
from dstrat.launch.progress import has_ended
from dstrat.testing import LauncherSuite, PluginSuite
from dstrat_ray import RayLauncher

pytestmark = [
    pytest.mark.neighbours,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("default"),  # Ray's own, in this process
]

SLOW = [pytest.mark.clusters, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    with two_machines(num_gpus=2) as machines:
        yield machines


@pytest.mark.usefixtures("cluster")
class TestRayLauncher(LauncherSuite):
    alias = "ray"


class TestPlugin(PluginSuite):
    distribution = "dstrat-ray"


def launcher(*, processes_per_node=2, num_nodes=1, **options):
    launcher = RayLauncher(**options)
    launcher.receive(processes_per_node=processes_per_node, num_nodes=num_nodes)
    return launcher


def describe():
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    return [os.environ.get(name) for name in names], ray.get_runtime_context().get_node_id()


def gather(folder):
    """Write what this rank is, and return how many there are."""
    names, node = describe()
    Path(folder, names[0]).write_text(" ".join([*map(str, names), node, str(os.getpid())]))
    return len(list(Path(folder).iterdir()))


def actors():
    """Return the process ids of living actors of ranks."""
    import psutil

    processes = psutil.process_iter(["pid", "cmdline"])
    return [one.info["pid"] for one in processes if "ray::RankActor" in " ".join(one.info["cmdline"] or ())]


def test_ranks_are_counted_machine_by_machine_and_see_its_gpus(cluster, tmp_path):
    launcher(num_nodes=2, gpus_per_rank=1).launch(gather, str(tmp_path))
    ranks = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert [rank[:5] for rank in ranks] == [
        ["0", "0", "0", "4", "0,1"],
        ["1", "1", "0", "4", "0,1"],
        ["2", "0", "1", "4", "0,1"],
        ["3", "1", "1", "4", "0,1"],
    ]
    nodes = [rank[5] for rank in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]


def test_failed_job_leaves_no_folder_and_no_placement_group(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("DSTRAT_STOP_SECONDS", "7")
    monkeypatch.setenv("API_TOKEN", "secret")
    with pytest.raises(RankFailedError, match=f"{tmp_path}/dstrat-job-.* 7 None"):  # only dstrat's variables are sent
        launcher(runtime_env={"env_vars": {"TMPDIR": str(tmp_path)}}).launch(raise_facts)
    assert not list(tmp_path.glob("dstrat-job-*"))
    assert {group["state"] for group in ray.util.placement_group_table().values()} == {"REMOVED"}


def raise_facts():
    names = (JOB_VARIABLE, "DSTRAT_STOP_SECONDS", "API_TOKEN")
    raise ValueError(" ".join(str(os.environ.get(name)) for name in names))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_training_on_two_machines_equals_one_device(cluster, strategy, tmp_path):
    module = Line()
    trainer = Trainer(strategy=strategy, devices=1, num_nodes=2, plugins="ray", default_root_dir=tmp_path, **OPTIONS)
    assert re.search(r"^launcher +ray +asked for", str(trainer.plan), re.MULTILINE)
    trainer.fit(module, loader(2))
    assert trainer.global_step == 8
    assert torch.allclose(module.layer.weight, weights_of_one_device(default_root_dir=tmp_path), rtol=1e-5)
    wait_until(lambda: not actors(), "actors are left")


SCRIPT = """
import torch
from dstrat import Trainer, TrainModule
from torch.utils.data import DataLoader, TensorDataset

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

net = Net()  # no guard: the script is not run again
trainer = Trainer(strategy="ddp", accelerator="cpu", devices=1, num_nodes=2, plugins="ray", max_steps=3,
                  logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(net, DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4))
print("trained", trainer.global_step, type(net).__module__)
"""


@pytest.mark.clusters
@pytest.mark.slow
def test_script_trains_modules_that_it_defines_itself(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, cwd=tmp_path, timeout=400
    )
    assert done.returncode == 0, done.stderr
    assert "trained 3 __main__" in done.stdout


@pytest.mark.clusters
@pytest.mark.slow
def test_program_without_a_script_launches_too(cluster, tmp_path):  # as a notebook
    code = textwrap.dedent(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-"], input=code, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=400
    )
    assert "trained 3 __main__" in done.stdout, done.stderr


# Failures


class FailingLine(Line):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise ValueError("no sample")
        return super().training_step(batch, batch_idx)


@pytest.mark.clusters
@pytest.mark.slow
def test_failing_rank_of_a_training_is_named_while_its_peer_waits(cluster, tmp_path):
    trainer = Trainer(strategy="ddp", devices=1, num_nodes=2, plugins="ray", default_root_dir=tmp_path, **OPTIONS)
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: no sample") as failed:
        trainer.fit(FailingLine(), loader(2))
    assert "training_step" in failed.value.rank_traceback
    wait_until(lambda: not actors(), "actors are left")


class WaitingLine(Line):
    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def training_step(self, batch, batch_idx):
        gather(self.folder)
        while batch_idx == 1:
            time.sleep(0.1)
        return super().training_step(batch, batch_idx)


WAITING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start programs in the background without it
from dstrat import Trainer
from packages.ray.tests.test_launcher import OPTIONS, WaitingLine, loader

trainer = Trainer(strategy="ddp", devices=1, num_nodes=2, plugins="ray", default_root_dir=sys.argv[1], **OPTIONS)
trainer.fit(WaitingLine(sys.argv[1]), loader(2))
"""


@pytest.fixture
def waiting(tmp_path):
    """A program whose two ranks wait in a step, and the folder with what they wrote."""
    root = Path(__file__).parents[3]
    folder = tmp_path / "ranks"
    folder.mkdir()
    program = subprocess.Popen(
        [sys.executable, "-c", WAITING, folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 2 or program.poll() is not None, "no ranks")
        assert program.poll() is None, program.communicate()[0]
        yield program, [Path(folder, rank).read_text().split() for rank in ("0", "1")]
    finally:
        program.kill()
        program.communicate()


@pytest.mark.clusters
@pytest.mark.slow
def test_actors_end_with_the_program_that_was_killed(cluster, waiting):
    program, ranks = waiting
    program.kill()
    wait_until(lambda: all(has_ended(int(rank[-1])) for rank in ranks), "ranks are alive")


@pytest.mark.clusters
@pytest.mark.slow
def test_interrupted_program_ends_its_actors(cluster, waiting):
    program, ranks = waiting
    program.send_signal(signal.SIGINT)
    output = program.communicate(timeout=400)[0]
    assert "KeyboardInterrupt" in output
    wait_until(lambda: all(has_ended(int(rank[-1])) for rank in ranks), "ranks are alive")


# What cannot run


def test_too_few_cpus_are_refused_at_once(cluster):
    with pytest.raises(
        LaunchError,
        match=r"launcher 'ray' needs 2 machines with 3 CPUs for 3 ranks each, and the Ray cluster has 2: "
        r".* \(2 CPUs and 2 GPUs\), .*: ask for fewer devices or num_nodes, start more machines with `ray start",
    ):
        launcher(processes_per_node=3, num_nodes=2).launch(describe)


def test_too_few_machines_are_refused_at_once(cluster):
    with pytest.raises(LaunchError, match=r"needs 3 machines with 1 CPU for 1 rank each, and the Ray cluster has 2: "):
        launcher(processes_per_node=1, num_nodes=3).launch(describe)


def test_gpus_that_the_cluster_lacks_are_refused(cluster):
    with pytest.raises(LaunchError, match=r"needs 1 machine with 1.5 CPUs and 3 GPUs for 3 ranks each"):
        launcher(processes_per_node=3, cpus_per_rank=0.5, gpus_per_rank=1).launch(describe)


def test_resources_in_use_are_waited_for_and_then_refused(cluster):
    holder = ray.remote(Holder).options(num_cpus=2).remote()
    ray.get(holder.wait.remote())
    with pytest.raises(LaunchError, match=r"needs 2 machines .*, which were not free within 3 s; free in the whole"):
        launcher(num_nodes=2, timeout=3).launch(describe)
    ray.kill(holder)


class Holder:
    def wait(self):
        return 0


@pytest.mark.clusters
@pytest.mark.slow
def test_actor_that_cannot_start_says_why(cluster):
    broken = {"env_vars": {"PYTHONHOME": "/nowhere"}}
    with pytest.raises(LaunchError, match=r"actors? of launcher 'ray' .*(did not start|could not be started)"):
        launcher(runtime_env=broken, timeout=8).launch(describe)


def test_argument_that_cannot_be_pickled_is_named(cluster):
    def print_later(lock):  # which Ray's pickler sends, unlike that of Python
        print(lock)

    with pytest.raises(LaunchError, match=r"sends the function and its arguments to actors, and argument 0 \(lock\)"):
        launcher().launch(print_later, threading.Lock())


def test_another_address_than_that_of_the_connection_is_refused(cluster):
    with pytest.raises(LaunchError, match=r"address='10.0.0.1:6379'\) is another cluster than '.*: leave the address"):
        launcher(address="10.0.0.1:6379").launch(describe)


def test_without_a_cluster_the_error_says_how_to_start_one(tmp_path):
    program = "from packages.ray.tests.test_launcher import launcher; launcher().launch(print)"
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=root,
        env={**environ, "RAY_ADDRESS": "127.0.0.1:9"},
        timeout=400,
    )
    assert (
        "launcher 'ray' cannot connect to a Ray cluster at address '127.0.0.1:9' ([Errno 111] Connection refused): "
        "start one with `ray start --head`"
    ) in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        {"cpus_per_rank": 0},
        {"cpus_per_rank": float("nan")},
        {"gpus_per_rank": -1},
        {"gpus_per_rank": 0.5},
        {"gpus_per_rank": 2},
        {"timeout": 0},
        {"timeout": float("inf")},
    ],
)
def test_arguments_out_of_range_are_refused(options):
    with pytest.raises(RequestError, match=r"needs some CPU, some seconds, and no or one GPU"):
        RayLauncher(**options)
