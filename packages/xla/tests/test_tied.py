"""Weights that layers share stay one parameter on XLA devices."""

import pytest
from packages.xla.tests.rank_fits import Net, begin, fit, loader
from tests.ranks import in_ranks


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


def tied(cluster, strategy):
    begin()
    net = Tied()
    losses = fit(strategy, net, loader(8))["losses"]
    return losses, net.blocks[1].up.weight is net.blocks[0].up.weight


@pytest.mark.parametrize("strategy", ["single_xla", "xla_spmd"])
def test_tied_weights_train_as_on_one_device(strategy):
    expected = fit("single_device", Tied(), loader(8), accelerator="cpu")["losses"]
    ((losses, are_tied),) = in_ranks(tied, 1, strategy=strategy)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert are_tied
