"""Whole state of a sharded module and its optimizers, gathered on rank 0 or scattered from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.portable.shards import holders, local_parts
from dstrat.errors import CheckpointError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.state_dict import groups_misfit, is_extra_state, misfit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.checkpoint.portable.shards import LocalBox
    from dstrat.interfaces.strategy import Strategy


def gathered(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return a state with its tensors whole on the CPU, gathered one after the other; collective.

    Args:
        state: A nested state, the same on every rank but for the shards.
        keep: Whether this rank wants it; the others get an empty dict.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        whole = whole_of(tensor) if isinstance(tensor, DTensor) else tensor
        return whole.detach().cpu() if keep else None

    whole: dict[str, Any] = apply_to_tensors(dict(state), gather)
    return whole if keep else {}


def load_module(module: Module, state: Mapping[str, Any], strategy: Strategy, *, strict: bool) -> None:
    """Load the whole state of rank 0 into a module; each rank takes its shards, one tensor at a time; collective.

    Args:
        module: Sharded.
        state: By name; only that of rank 0 counts.
        strategy: Communicates.
        strict: Whether it is an error that names are missing or left over; otherwise that is logged.

    Raises:
        CheckpointError: Names are missing or left over, or a tensor has another shape.
    """
    targets = module.state_dict()
    _agree_on(strategy, lambda: misfit(module, targets, state, strict=strict))
    others = {}
    for name, target in targets.items():
        if not strategy.broadcast(name in state):
            continue
        if isinstance(target, Tensor) and not is_extra_state(name):
            copy_whole(target, _from_rank_0(state.get(name), target.shape, target.dtype, strategy))
        else:
            others[name] = strategy.broadcast(state.get(name))
    if others:
        module.load_state_dict(others, strict=False)


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
    _agree_on(strategy, lambda: groups_misfit(optimizer, groups, [group["params"] for group in state["param_groups"]]))
    parameters = [parameter for group in groups for parameter in group]
    outline = strategy.broadcast(apply_to_tensors(dict(state), _described))
    entries = {
        index: {key: _loaded(value, parameters[index], state, (index, key), strategy) for key, value in entry.items()}
        for index, entry in outline["state"].items()
    }
    optimizer.load_state_dict({"state": entries, "param_groups": outline["param_groups"]})


class _Described:
    """What is told to the other ranks of a tensor before it is sent."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


def _described(tensor: Tensor) -> _Described:
    return _Described(tensor)


def _loaded(value: Any, parameter: Tensor, state: Mapping[str, Any], place: tuple[int, str], strategy: Strategy) -> Any:
    """Return a value of an optimizer's state: a tensor of its parameter's shape is sharded as the parameter is."""
    if not isinstance(value, _Described):
        return value
    index, key = place
    source = state["state"][index][key] if strategy.is_global_zero else None
    whole = _from_rank_0(source, value.shape, value.dtype, strategy)
    return _shard_like(parameter, whole)


def _shard_like(parameter: Tensor | None, value: Any) -> Any:
    """Return this rank's shard of a tensor that has the shape of a sharded parameter, and anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    return shard_like(parameter, value)


def _from_rank_0(source: Tensor | None, shape: torch.Size, dtype: torch.dtype, strategy: Strategy) -> Tensor:
    whole = torch.empty(shape, dtype=dtype, device=strategy.root_device)
    if strategy.is_global_zero and source is not None:
        whole.copy_(source)
    torch.distributed.broadcast(whole, src=0)
    return whole


def _agree_on(strategy: Strategy, find: Callable[[], str | None]) -> None:
    """Raise on every rank what rank 0 has found wrong, so that none of them waits for it."""
    found = strategy.broadcast(find() if strategy.is_global_zero else None)
    if found is not None:
        raise CheckpointError(found)


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


def _box(part: LocalBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(part.starts, part.tensor.shape, strict=True))
