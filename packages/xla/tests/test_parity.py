"""Losses of one XLA device are those of one device."""

from __future__ import annotations

import pytest
from xla_fit import ON_CPU, losses_of


def tolerance(losses, others):
    return ((losses - others).abs() / others.abs()).max().item()


@pytest.mark.parametrize("alias", ["single_xla", "xla"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_losses_are_those_of_one_device(alias, accumulate, clip):
    asked = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    reference = losses_of(**ON_CPU, **asked)
    assert len(reference) == 20
    assert tolerance(losses_of(strategy=alias, **asked), reference) < 1e-5
