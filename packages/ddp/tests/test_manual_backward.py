"""Training steps that run backward by themselves."""

import pytest
import torch
from ddp_loop import Net, batches, parts, share, start
from torch import nn

from dstrat.builtin.strategies.single_device import SingleDeviceStrategy
from dstrat_ddp import DDPStrategy


class TwoLosses(Net):
    """Two optimizers, each with a loss of its own part, stepped inside the training step."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(6, 3)
        self.first = torch.optim.SGD(self.layers.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.other.parameters(), lr=0.1)
        self.strategy = None
        self.accumulate = False

    def configure_optimizers(self):
        return self.first

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        losses = []
        for part, optimizer in ((self.layers, self.first), (self.other, self.second)):
            loss = nn.functional.mse_loss(part(inputs), targets)
            if self.accumulate and batch_idx % 2 == 0:
                with self.strategy.no_backward_sync():
                    self.strategy.backward(loss)
            else:
                self.strategy.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        self.seen += 1 + self.strategy.global_rank
        return torch.stack(losses)


def manual_losses(strategy, given, accumulate):
    module = TwoLosses()
    start(strategy, module, given)
    module.strategy, module.accumulate = strategy, accumulate
    losses = []
    for index, batch in enumerate(batches()):
        losses += strategy.reduce(strategy.training_step(share(strategy, batch), index)).tolist()
    buffers = float(module.seen)
    module.strategy = None
    strategy.teardown()
    return losses, buffers


def ddp_losses(cluster, accumulate, **options):
    return manual_losses(DDPStrategy(find_unused_parameters=True), parts(cluster), accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_are_those_of_one_device(ranks, world_size, accumulate):
    expected = manual_losses(SingleDeviceStrategy(), parts(), accumulate)
    for rank, (losses, seen) in enumerate(ranks(ddp_losses, world_size, accumulate=accumulate)):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert seen == expected[1] + rank  # a step begins with the buffers of rank 0
