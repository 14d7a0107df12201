"""Losses of one XLA device are those of one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from xla_fit import ON_CPU, losses_of

WAYS = {"plain": {}, "accumulation and clipping": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}}


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_device(way):
    expected = losses_of(**ON_CPU, **WAYS[way]).tolist()
    assert len(expected) == 20
    for alias in ("single_xla", "xla"):
        assert losses_of(strategy=alias, **WAYS[way]).tolist() == pytest.approx(expected, rel=1e-5), alias


def test_running_variances_are_biased_as_documented():
    samples = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    norm, other = nn.BatchNorm1d(3, momentum=1.0), nn.BatchNorm1d(3, momentum=1.0).to("xla")
    norm(samples), other(samples.to("xla"))
    torch.testing.assert_close(norm.running_var, other.running_var.cpu() * 8 / 7)
