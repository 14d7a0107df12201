"""Agreement check between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Hashable


def is_same_on_all_ranks(values: Hashable, group: Any, device: torch.device) -> bool:
    """Return whether all ranks have equal values; collective, with two numbers.

    Args:
        values: Numbers, and tuples of them, whose hash is the same in each process.
        group: Of torch.distributed.
        device: Where its collectives work.
    """
    number = hash(values) % 2**62
    bounds = torch.tensor([number, -number], device=device)
    distributed.all_reduce(bounds, distributed.ReduceOp.MAX, group=group)
    largest, negated_least = bounds.tolist()
    return bool(largest == -negated_least)
