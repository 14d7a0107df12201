"""This rank's part of a tensor, by the mesh and the placements of a DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from torch import Tensor


def slice_for(sharded: DTensor, whole: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank keeps of a sharded one, as a view.

    Args:
        sharded: Says which part.
        whole: Of the same shape.
    """
    shape, offset = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


@torch.no_grad()
def copy_whole(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank communicates.

    Args:
        target: A tensor, or a DTensor of which this rank takes its part.
        whole: Of the same shape.
    """
    if isinstance(target, DTensor):
        target.to_local().copy_(slice_for(target, whole))
    else:
        target.copy_(whole)
