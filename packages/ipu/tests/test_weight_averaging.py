"""Averages of weights, which are on the device between the steps."""

import pytest
import torch
from ipu_fit import ON_CPU, ON_IPU, QUIET, Regression, data

from dstrat import EMAWeightAveraging, Trainer, seed_everything


def fit(**where):
    seed_everything(3)
    module = Regression()
    trainer = Trainer(**QUIET, **where, max_epochs=2, num_sanity_val_steps=0, callbacks=[EMAWeightAveraging(decay=0.8)])
    trainer.fit(module, data(shuffle=False), data(40, shuffle=False))
    return trainer.callback_metrics["val_loss"].item(), module.state_dict()


def test_the_average_is_that_of_the_cpu():
    expected_loss, expected = fit(**ON_CPU)
    loss, weights = fit(**ON_IPU)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value.as_subclass(torch.Tensor), expected[name], rtol=1e-5, atol=1e-6)
