"""Two machines of a Ray cluster, as two raylets, and what tests start there."""

import contextlib
import os
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray sends none from tests
ray = pytest.importorskip("ray", reason="needs Ray: nox -s neighbours")

from ray.cluster_utils import Cluster  # noqa: E402 - skipped before, where Ray is missing

from dstrat import Trainer, TrainModule  # noqa: E402 - as above

CPUS = 2  # of each machine
OPTIONS = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@contextlib.contextmanager
def two_machines(**resources):
    """Start two raylets, and connect to them."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False, **resources})
    try:
        cluster.add_node(num_cpus=CPUS, **resources)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(address=cluster.address, logging_level="warning", log_to_driver=False)
        yield cluster
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        ray.shutdown()
        cluster.shutdown()


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(world_size):
    """Return a loader whose batches have 8 samples on all ranks together."""
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=8 // world_size)


def weights_of_one_device(**options):
    """Return the weights after the same training on one device."""
    module = Line()
    Trainer(strategy="single_device", devices=1, **{**OPTIONS, **options}).fit(module, loader(1))
    return module.layer.weight.detach()


def wait_until(condition, what, seconds=60):
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {seconds} s"
        time.sleep(0.1)
