"""What an optimizer keeps of a parameter, found out with a parameter of two elements."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def state_after_one_step(optimizer: Optimizer, group: int, like: Tensor) -> dict[str, Any]:
    """Return the state that the optimizer has of a parameter of two elements after a step without gradients.

    Args:
        optimizer: Stays as it is.
        group: Index of the group whose options count.
        like: Says device and dtype.

    Returns:
        The state by its keys; empty where the optimizer cannot be copied, as one that is compiled.
    """
    parameter = torch.zeros(2, dtype=like.dtype, device=like.device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    try:
        probe = copy.copy(optimizer)
        probe.state = defaultdict(dict)
        probe.param_groups = [{**optimizer.param_groups[group], "params": [parameter]}]
        probe.step()
    except Exception:  # noqa: BLE001 - whatever a stranger's optimizer raises; then nothing is known of it
        return _known(optimizer, parameter)
    return dict(probe.state[parameter])


def _known(optimizer: Optimizer, parameter: Tensor) -> dict[str, Any]:
    if type(optimizer).__name__ != "DeepSpeedCPUAdam":
        return {}
    moments = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": 0, **moments}
