"""Whole tensors and this rank's part of them, by the mesh and the placements of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dstrat.builtin.checkpoint.portable.parts import holders, local_parts

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat.builtin.checkpoint.portable.parts import Part


def with_local(sharded: DTensor, local: Tensor) -> DTensor:
    """Return a tensor that is sharded as another is, of which this rank has a given part."""
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def shard_like(sharded: DTensor, whole: Tensor) -> DTensor:
    """Return a whole tensor sharded as another is; no rank communicates.

    Args:
        sharded: Says which part is this rank's, and on which device.
        whole: Of the same shape, on every rank.
    """
    shard = with_local(sharded, torch.empty_like(sharded.to_local(), dtype=whole.dtype))
    copy_whole(shard, whole)
    return shard


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank communicates.

    Args:
        target: A tensor, or a DTensor of which this rank takes its part.
        whole: Of the same shape.
    """
    if isinstance(target, DTensor):
        for part in local_parts(target):
            part.tensor.copy_(whole[_box(part)])
    else:
        target.copy_(whole)


@torch.no_grad()
def whole_of(sharded: DTensor) -> Tensor:
    """Return a sharded tensor whole, on every rank and on its device; collective over all ranks of the job.

    torch 2.9 gathers the rows of a tensor in a wrong order where two dimensions of the mesh shard them unevenly; so
    these are put together here, from a sum of bytes to which one rank adds each.
    """
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in sharded.placements):
        whole: Tensor = sharded.full_tensor()
        return whole
    sum_of_parts = torch.zeros(sharded.shape, dtype=sharded.dtype, device=sharded.device)
    if holders(sharded)[0] == dist.get_rank():
        for part in local_parts(sharded):
            sum_of_parts[_box(part)] = part.tensor
    dist.all_reduce(sum_of_parts.view(torch.uint8))
    return sum_of_parts


def _box(part: Part) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.starts, part.tensor.shape, strict=True))
