"""Graphs: mark_step, and the seed that follows torch's."""

import functools

import torch

from habana_frameworks.torch import _device, hpu
from habana_frameworks.torch.utils.internal import is_lazy

__all__ = ["hpu", "is_lazy", "mark_step"]

torch._register_device_module("hpu", hpu)


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End the graph of recorded operations; in eager mode there is none."""
    _device.simulator.mark_step()


_manual_seed = torch.manual_seed


@functools.wraps(torch.manual_seed)
def _seed_both(seed):
    hpu.random.manual_seed(seed)
    return _manual_seed(seed)


torch.manual_seed = _seed_both
