"""Ending DistributedDataParallel and its process group without waiting for anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dstrat.parallel.process_group import close_process_group

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def release_reducer(model: DistributedDataParallel) -> None:
    """Free what averages the gradients of a model, which cannot be used any more.

    It goes before the process group, also where a traceback keeps the model alive.  Were the reducer the last to let
    the group go, torch would wait for the group's threads while it holds Python's lock, for which they may wait.
    """
    for name in ("logger", "reducer"):  # the logger refers to the reducer
        model.__dict__.pop(name, None)


def abort_process_group() -> None:
    """Close the default process group without waiting for what is under way."""
    # Closing waits for NCCL's collectives, which never end when a rank is gone; other backends fail by themselves.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        abort()
    close_process_group()
