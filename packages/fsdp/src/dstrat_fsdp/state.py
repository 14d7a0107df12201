"""Optimizer state and tensors of the shards of one rank, made of whole ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.whole_state import agree_on, copy_whole, scatter_optimizer_entries
from dstrat.interfaces.state_dict import groups_misfit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Strategy


def as_shards(state: Mapping[str, Any], module: Module) -> dict[str, Any]:
    """Return an optimizer's state, by names, with this rank's shards in the place of whole tensors.

    Args:
        state: Each rank has it all; what is sharded already stays as it is.
        module: Whose parameters say which part is this rank's.
    """
    parameters = dict(module.named_parameters())
    entries = {
        name: {key: _shard_like(parameters.get(name), value) for key, value in entry.items()}
        for name, entry in state["state"].items()
    }
    return {**state, "state": entries}


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], strategy: Strategy) -> None:
    """Load the whole state of rank 0 into an optimizer; collective.

    Args:
        optimizer: Of sharded parameters.
        state: As ``optimizer.state_dict()`` on one device; only that of rank 0 counts.
        strategy: Communicates.

    Raises:
        CheckpointError: It is the state of another optimizer.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    agree_on(strategy, lambda: groups_misfit(optimizer, groups, [group["params"] for group in state["param_groups"]]))
    parameters = [parameter for group in groups for parameter in group]
    entries = scatter_optimizer_entries(
        strategy, state.get("state", {}), lambda number, whole: _shard_like(parameters[number], whole)
    )
    optimizer.load_state_dict({"state": entries, "param_groups": strategy.broadcast(state.get("param_groups"))})


def _shard_like(parameter: Tensor | None, value: Any) -> Any:
    """Return this rank's shard of a tensor that has the shape of a sharded parameter, and anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    return shard_like(parameter, value)


# Whole tensors and this rank's part of them, by the mesh and the placements of a DTensor.


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
