"""The smallest complete subclasses in the docstrings of the interfaces: they are complete, and they train."""

import functools
import inspect
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.launcher import Launcher
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy
from dstrat.parallel.gradient_sync import GradientSyncStrategy
from dstrat.parallel.step_module import StepModule
from dstrat.parallel.strategy import ParallelStrategy


def example_of(interface):
    """Return the class that the interface's docstring defines."""
    _, _, text = inspect.getdoc(interface).partition("::\n\n")
    lines = text.splitlines(keepends=True)
    end = next((index for index, line in enumerate(lines) if line.strip() and not line.startswith("    ")), len(lines))
    names = {
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "StepModule": StepModule,
        "partial": functools.partial,
        "torch": torch,
        interface.__name__: interface,
    }
    exec(textwrap.dedent("".join(lines[:end])), names)
    (example,) = (value for value in names.values() if isinstance(value, type) and value.__base__ is interface)
    return example


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, ckpt_path=None, **options):
    torch.manual_seed(0)
    net, data = Net(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, **{"accelerator": "cpu", **options}, **quiet)
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return trainer, net.layer.weight.detach().clone()


@pytest.fixture
def expected(tmp_path):
    return fit(tmp_path, devices=1)[1]


@pytest.mark.parametrize(
    ("option", "interface"),
    [("strategy", Strategy), ("accelerator", Accelerator), ("precision", Precision), ("plugins", CheckpointIO)],
)
def test_example_trains_as_the_default_does(tmp_path, expected, option, interface):
    options = {"devices": 1, option: example_of(interface)()}
    trainer, weight = fit(tmp_path, **options)
    assert torch.equal(weight, expected)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    resumed, weight = fit(tmp_path, ckpt_path=tmp_path / "model.ckpt", **options)
    assert torch.equal(weight, expected)
    assert resumed.global_step == trainer.global_step == 4


@pytest.mark.parametrize("interface", [ParallelStrategy, GradientSyncStrategy])
def test_example_of_several_processes_trains_as_one_device_does(tmp_path, expected, interface):
    _, weight = fit(tmp_path, devices=2, strategy=example_of(interface)(start_method="fork"))
    assert torch.allclose(weight, expected)


def test_example_of_a_launcher_runs_the_function():
    launcher = example_of(Launcher)()
    assert launcher.launch(divmod, 7, 2) == (3, 1)


def test_example_of_a_cluster_reads_its_variables():
    environ = {
        "MY_JOB_ID": "7",
        "MY_HEAD_NODE": "n1",
        "MY_SIZE": "4",
        "MY_RANK": "3",
        "MY_LOCAL_RANK": "1",
        "MY_NODE": "1",
    }
    example = example_of(ClusterEnvironment)
    assert example.evidence({}) is None
    assert example.evidence(environ) == "MY_JOB_ID is set"
    cluster = example(environ)
    assert (cluster.main_address, cluster.main_port, cluster.world_size) == ("n1", 29500, 4)
    assert (cluster.global_rank, cluster.local_rank, cluster.node_rank) == (3, 1, 1)
