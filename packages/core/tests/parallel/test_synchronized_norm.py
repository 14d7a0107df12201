from __future__ import annotations

import torch
from torch import nn

from dstrat import ParallelStrategy, Trainer
from dstrat.parallel.strategy import SynchronizedNorm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3, affine=False))])
        self.own = nn.SyncBatchNorm(3)


def kinds(net):
    return [type(part) for part in net.modules() if "BatchNorm" in type(part).__name__]


def test_layers_share_their_statistics_until_it_is_undone():
    net = Net()
    layer, before = net.first, dict(net.named_modules())
    optimized = torch.optim.SGD(net.parameters(), lr=0.1)
    synchronized = SynchronizedNorm(net)
    assert kinds(net) == [nn.SyncBatchNorm] * 3
    assert {id(p) for group in optimized.param_groups for p in group["params"]} == {id(p) for p in net.parameters()}
    net.double()  # as a precision or a device does: buffers are other tensors then
    with torch.no_grad():
        net.first.weight.fill_(5.0)
        net.first.running_mean.fill_(7.0)
    net.eval()
    trained = {name: value.clone() for name, value in net.state_dict().items()}

    synchronized.undo()
    assert kinds(net) == [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm]
    assert dict(net.named_modules()) == before
    assert net.first is layer
    assert not layer.training
    assert net.state_dict().keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in net.state_dict().items())
    assert {id(p) for group in optimized.param_groups for p in group["params"]} == {id(p) for p in net.parameters()}
    torch.testing.assert_close(layer(torch.full((2, 3), 7.0).double()), layer.bias.expand(2, 3))


def test_a_strategy_undoes_it_at_the_end():
    class OnDevice(ParallelStrategy):
        root_device = property(lambda self: torch.device("meta"))  # the CPU has no SyncBatchNorm

    net = Net()
    strategy = Trainer(accelerator="cpu", devices=2, strategy=OnDevice(start_method="fork"), logger=False).strategy
    strategy.connect(net)
    strategy.synchronize_batchnorm()
    assert kinds(net) == [nn.SyncBatchNorm] * 3
    strategy.teardown()
    assert kinds(net) == [nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm]


def test_a_layer_that_two_parents_share_stays_one_layer():
    layer = nn.BatchNorm1d(3)
    net = nn.Sequential(nn.Sequential(layer), nn.Sequential(layer))
    synchronized = SynchronizedNorm(net)
    assert net[0][0] is net[1][0]
    synchronized.undo()
    assert net[0][0] is net[1][0] is layer
