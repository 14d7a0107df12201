"""Reads of values of shards, such as by ``item()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.errors import MisuseError
from dstrat.parallel.full_state import full_tensor
from dstrat_fsdp import internals

if TYPE_CHECKING:
    from torch._ops import OpOverload


def read_full_values() -> None:
    """Let ``item()``, ``float()`` and ``bool()`` of a ``DTensor`` return its full value on each rank, from now on.

    torch returns what this rank has of it: of ``parameter.grad.norm()`` the norm of its own shard.  The read of a value
    that ranks have parts of is collective.  It stays so after a run, whose module keeps its shards.
    """
    internals.set_dispatch_handler([torch.ops.aten._local_scalar_dense.default], _read)  # noqa: SLF001 - its name


def _read(operation: OpOverload, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if all(placement.is_replicate() for placement in tensor.placements):
        return internals.dispatch(operation, args, kwargs)
    if not dist.is_initialized():
        raise MisuseError(
            "a value of a module's shards was read after the run that sharded it, such as parameter.norm().item(), and "
            "each rank has a part of it only: read it in on_train_end, or load a checkpoint into a new module"
        )
    return full_tensor(tensor.detach()).item()
