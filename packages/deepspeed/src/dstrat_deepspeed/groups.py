"""Agreement of ranks, and the end of process groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


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


# Ending DeepSpeed without waiting for anybody.


def release_groups(engine: Any) -> None:
    """Take the process groups out of an engine that has been destroyed, and out of what DeepSpeed has made for it.

    A group closes, and the other ranks notice that this one has failed, only when nothing holds it; a traceback keeps
    the engine alive.
    """
    for part in _parts(engine):
        for name, value in list(vars(part).items()):
            if _has_group(value):
                vars(part)[name] = None


def _parts(engine: Any) -> Iterator[Any]:
    waiting, seen = [engine], {id(engine)}
    while waiting:
        part = waiting.pop()
        yield part
        for value in vars(part).values():
            if type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__") and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


def _has_group(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, ProcessGroup) or (
        isinstance(value, (list, tuple)) and any(isinstance(each, ProcessGroup) for each in value)
    )
