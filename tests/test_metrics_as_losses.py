"""Metrics that are computed in steps, over all ranks, as losses: their gradient is that of one device."""

from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import loader, quiet_trainer
from torch import nn

from dstrat import TrainModule

if find_spec("torchmetrics") is None:
    pytest.skip("torchmetrics is not installed", allow_module_level=True)


class Measured(TrainModule):
    """Its loss is the sum of a loss of the batch and metrics with states of each kind: sum, mean and list."""

    def __init__(self, split=False):
        super().__init__()
        import torchmetrics as tm

        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.split = split
        self.error, self.correlation = (
            tm.MeanSquaredError(dist_sync_on_step=True),
            tm.PearsonCorrCoef(dist_sync_on_step=True),
        )
        self.listed = tm.CatMetric(dist_sync_on_step=True)

    def configure_model(self):
        if self.split:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.net(inputs)
        loss = (outputs - targets).abs().mean()
        loss = loss + self.error(outputs, targets) - self.correlation(outputs[:, 0], targets[:, 0])
        return loss + self.listed(outputs[:, 1]).square().mean()

    def on_train_end(self):
        weights = self.trainer.strategy.module_state_dict()  # on rank 0
        self.weights = {name: value for name, value in (weights or {}).items() if name.startswith("net")}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(cluster, strategy="single_device", sizes=None):
    """Return the weights after a training, on rank 0."""
    if sizes is not None:
        from dstrat_fsdp import ModelParallelStrategy

        strategy = ModelParallelStrategy(*sizes)
    readers = 1 if cluster is None else cluster.world_size if sizes is None else sizes[0]
    module = Measured(split=sizes is not None)
    quiet_trainer(strategy, cluster).fit(module, loader(32, 8 // readers))
    return module.weights


def test_the_gradient_of_a_metric_over_all_ranks_is_that_of_one_device():
    expected = fitted(None)
    cases = {name: {"strategy": name} for name in ("ddp", "fsdp")} | {"tensor parallel": {"sizes": (1, 2)}}
    results, _ = in_ranks(each, function=fitted, cases=cases)
    assert results.keys() == cases.keys()
    for name, weights in results.items():
        torch.testing.assert_close(
            weights, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
def test_ranks_that_share_a_batch_count_it_once_in_the_gradient_of_a_metric():
    weights, *_ = in_ranks(fitted, 4, sizes=(2, 2))
    torch.testing.assert_close(weights, fitted(None), rtol=1e-5, atol=1e-6)
