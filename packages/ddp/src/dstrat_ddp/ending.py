"""Ending DistributedDataParallel without waiting for anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def release_reducer(model: DistributedDataParallel) -> None:
    """Free what averages the gradients of a model, which cannot be used any more.

    It goes before the process group, also where a traceback keeps the model alive.  Were the reducer the last to let
    the group go, torch would wait for the group's threads while it holds Python's lock, for which they may wait.
    The other ranks notice that this one has failed only when nothing holds the group.
    """
    for name in ("logger", "reducer", "process_group"):  # the logger refers to the reducer
        model.__dict__.pop(name, None)
