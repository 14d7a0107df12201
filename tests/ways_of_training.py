"""Ways of training in which several ranks must have the losses of one device, in float32."""

from __future__ import annotations

import pytest
from tests.hand_loop import single_device_losses

SHORT = {"steps": 6}  # enough to show a difference
WAYS = {
    "plain": {},
    "accumulation": {"accumulate": 3, **SHORT},
    "clipping by norm": {"clip": 0.05, **SHORT},
    "clipping by value": {"clip": 0.03, "algorithm": "value", **SHORT},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05, **SHORT},
}


def losses_of_one_device(module_class):
    """What ranks must find in each way of training."""
    losses = {way: single_device_losses(module_class(), **options) for way, options in WAYS.items()}
    assert losses["plain"][-1] < losses["plain"][0] / 2, losses  # it learns, so that there is something to compare
    assert len({tuple(values) for values in losses.values()}) == len(losses), losses  # each way makes a difference
    return {way: pytest.approx(values, rel=1e-6, abs=0) for way, values in losses.items()}
