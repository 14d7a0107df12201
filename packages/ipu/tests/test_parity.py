"""Losses and counters of IPUs are those of one device; on the simulator."""

from __future__ import annotations

import pytest
import torch
from ipu_fit import ON_CPU, data, fit, made

from dstrat_ipu import IPUStrategy


def furthest(losses, others):
    losses, others = torch.tensor(losses), torch.tensor(others)
    assert losses.shape == others.shape
    return ((losses - others).abs() / others.abs()).max().item()


@pytest.fixture(scope="module")
def reference():
    """Losses of one device by the number of accumulated batches, over 20 optimizer steps of 32 samples each."""
    known = {}

    def losses(accumulate, **options):
        key = (accumulate, *sorted(options.items()))
        if key not in known:
            loader = data(20 * accumulate * 32, batch_size=32)
            known[key] = fit(made(**options), loader, **ON_CPU, accumulate_grad_batches=accumulate)[0].losses
        return known[key]

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_losses_are_those_of_one_device(reference, devices, iterations, accumulate):
    module, trainer = fit(
        made(),
        data(20 * accumulate * 32, batch_size=32 // devices),
        strategy=IPUStrategy(device_iterations=iterations),
        devices=devices,
        accumulate_grad_batches=accumulate,
    )
    assert trainer.global_step == 20
    assert trainer.fit_loop.batches_seen == 20 * accumulate == len(module.losses)
    assert furthest(module.losses, reference(accumulate)) < 1e-5
