"""Weights that layers share stay one parameter on XLA devices."""

import pytest
from packages.xla.tests.rank_fits import Tied, fit, loader


def test_tied_weights_train_as_on_one_device():
    expected = fit("single_device", Tied(), loader(8), accelerator="cpu")["losses"]
    net = Tied()
    assert fit("single_xla", net, loader(8))["losses"] == pytest.approx(expected, rel=1e-5)
    assert net.is_tied
