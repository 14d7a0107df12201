"""Optimizer state and tensors of one rank's shards, made from full ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.parallel.full_state import copy_full

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module


def as_shards(state: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """Return an optimizer's state, by names, with this rank's shards instead of full tensors.

    Args:
        state: The full state, on each rank; sharded tensors stay as they are.
        module: The module, whose parameters define the shards.
    """
    parameters = dict(module.named_parameters())
    entries = {
        name: {key: _as_shard(parameters.get(name), value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    return {**state, "state": entries}


def _as_shard(parameter: Tensor | None, value: Any) -> Any:
    """Return this rank's shard of a tensor with the shape of a sharded parameter; other values unchanged."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:  # such as the count of steps
        return value
    return shard_like(parameter, value)


# Shards of this rank, by the mesh and the placements of a DTensor


def local_tensor(tensor: Any) -> Any:
    """Return this rank's shard of a DTensor, in the same memory; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(sharded: DTensor, local: Tensor) -> DTensor:
    """Return a tensor that is sharded like another, from this rank's shard."""
    return DTensor.from_local(
        local,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,  # it would communicate; shape and stride are needed as shards may differ in size
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def shard_like(sharded: DTensor, full: Tensor) -> DTensor:
    """Return a full tensor sharded like another, without communication.

    Args:
        sharded: The other tensor, which defines the shard and its device.
        full: The full tensor of the same shape, on every rank.
    """
    shard = with_local(sharded, torch.empty_like(sharded.to_local(), dtype=full.dtype))
    copy_full(shard, full)
    return shard
