"""Whole states on rank 0: gathered from the shards of all ranks, or dealt out to them, one tensor at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.fitting import is_extra_state
from dstrat.interfaces.flat_shard import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dstrat.interfaces.strategy import Strategy


def gathered(state: Any, strategy: Strategy) -> Any:
    """Return a nested state with its tensors whole on the CPU of rank 0, and without them elsewhere; collective."""
    if isinstance(state, FlatShard):
        return _whole(state, strategy)
    if isinstance(state, Tensor):
        return state.detach().cpu() if strategy.is_global_zero else None
    if isinstance(state, dict):
        return {key: gathered(value, strategy) for key, value in state.items()}
    return state


def _whole(shard: FlatShard, strategy: Strategy) -> Tensor | None:
    whole = torch.zeros(shard.shape, dtype=shard.dtype, device=strategy.root_device)
    whole.view(-1)[shard.start : shard.start + shard.local.numel()] = shard.local
    # Each byte is added to zeros: exactly what one rank has.
    dist.reduce(whole.view(-1).view(torch.uint8), 0)
    return whole.cpu() if strategy.is_global_zero else None


def by_numbers(state: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state as ``Optimizer.state_dict`` does: parameters by number."""
    numbers = {name: number for number, name in enumerate(name for names in group_names for name in names)}
    return {
        "state": {numbers[name]: entry for name, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_names(state: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the same with the names of parameters."""
    names = [name for names in group_names for name in names]
    return {
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }


def agree_on(strategy: Strategy, find: Callable[[], str | None]) -> None:
    """Raise on every rank what rank 0 has found wrong, so that none of them waits for it; collective."""
    found = strategy.broadcast(find() if strategy.is_global_zero else None)
    if found is not None:
        raise CheckpointError(found)


@torch.no_grad()
def deal_out(targets: Mapping[str, Any], state: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Copy the tensors of rank 0 into those that each rank holds; return what is no tensor; collective."""
    rest = {}
    for name, target in targets.items():
        if not strategy.broadcast(name in state):
            continue
        if not isinstance(target, Tensor | FlatShard) or is_extra_state(name):
            rest[name] = strategy.broadcast(state.get(name))
            continue
        whole = from_rank_0(state.get(name), tuple(target.shape), target.dtype, strategy)
        if isinstance(target, FlatShard):
            target.local.copy_(target.taken_from(whole))
        else:
            target.copy_(whole)
    return rest


def from_rank_0(source: Any, shape: tuple[int, ...], dtype: torch.dtype, strategy: Strategy) -> Tensor:
    """Return a tensor that rank 0 has; collective."""
    whole = torch.empty(shape, dtype=dtype, device=strategy.root_device)
    if strategy.is_global_zero:
        whole.copy_(source)
    dist.broadcast(whole, 0)
    return whole


def told_by_rank_0(entries: Mapping[str, Any], parts: Mapping[str, FlatShard], strategy: Strategy) -> dict[str, Any]:
    """Return the states of parameters that rank 0 has, of each tensor only what this rank needs; collective.

    Args:
        entries: By the names of parameters; only those of rank 0 count.
        parts: For each parameter which elements this rank has.
        strategy: Communicates.
    """
    outline = {
        name: {key: (tuple(value.shape), value.dtype) for key, value in entry.items() if isinstance(value, Tensor)}
        for name, entry in entries.items()
    }
    plain = {
        name: {key: value for key, value in entry.items() if not isinstance(value, Tensor)}
        for name, entry in entries.items()
    }
    outline, plain = strategy.broadcast((outline, plain))
    told: dict[str, Any] = {name: dict(entry) for name, entry in plain.items()}
    for name, tensors in outline.items():
        for key, (shape, dtype) in tensors.items():
            whole = from_rank_0(entries[name][key] if strategy.is_global_zero else None, shape, dtype, strategy)
            part = parts.get(name)
            if part is not None and shape and shape == part.shape:
                local = part.taken_from(whole).clone()
                told[name][key] = FlatShard(local=local, start=part.start, shape=shape)
            else:
                told[name][key] = whole.cpu()
    return told
