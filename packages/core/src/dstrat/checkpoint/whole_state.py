"""Whole state of a sharded module and its optimizers: gathered on rank 0, or scattered from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.portable.shards import holders, local_boxes
from dstrat.errors import CheckpointError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.interfaces.state_dict import is_extra_state, misfit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dstrat.checkpoint.portable.shards import LocalBox
    from dstrat.interfaces.strategy import Strategy

Key = TypeVar("Key")


def agree_on(strategy: Strategy, find_problem: Callable[[], str | None]) -> None:
    """Raise the error that rank 0 finds on every rank, so that none waits for it; collective.

    Args:
        strategy: Communicates.
        find_problem: Called on rank 0; returns a message, or None.

    Raises:
        CheckpointError: Rank 0 found a problem.
    """
    problem = strategy.broadcast(find_problem() if strategy.is_global_zero else None)
    if problem is not None:
        raise CheckpointError(problem)


# Gathering


def gather_state(state: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return a state with whole tensors on the CPU of rank 0, and an empty dict on the others; collective.

    Tensors are gathered one after the other, so that only one of them is whole on the device.

    Args:
        state: A nested state, the same on every rank but for its shards: DTensors, or FlatShards.
        strategy: Communicates.
    """

    def gather_tensor(tensor: Tensor) -> Tensor | None:
        whole = whole_of(tensor) if isinstance(tensor, DTensor) else tensor
        return whole.detach().cpu() if strategy.is_global_zero else None

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: gather(inner) for key, inner in value.items()}
        if isinstance(value, FlatShard):
            return gather_tensor(_sum_on_rank_0(value, strategy.root_device))
        return apply_to_tensors(value, gather_tensor)

    gathered: dict[str, Any] = gather(state)
    return gathered if strategy.is_global_zero else {}


def _sum_on_rank_0(shard: FlatShard, device: torch.device) -> Tensor:
    whole = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
    shard.taken_from(whole).copy_(shard.local)
    # Each byte is added to zeros: exactly what one rank has.
    dist.reduce(whole.view(-1).view(torch.uint8), 0)
    return whole


@torch.no_grad()
def whole_of(sharded: DTensor) -> Tensor:
    """Return a sharded tensor whole, on every rank and on its device; collective over all ranks of the job.

    torch 2.9 gathers the rows of a tensor in a wrong order where two dimensions of the mesh shard them unevenly; so
    these are put together here, from a sum of bytes to which one rank adds each.
    """
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in sharded.placements):
        whole: Tensor = sharded.full_tensor()
        return whole
    sum_of_boxes = torch.zeros(sharded.shape, dtype=sharded.dtype, device=sharded.device)
    if holders(sharded)[0] == dist.get_rank():
        for box in local_boxes(sharded):
            sum_of_boxes[_slices(box)] = box.tensor
    dist.all_reduce(sum_of_boxes.view(torch.uint8))
    return sum_of_boxes


# Scattering


def scatter_module_state(
    strategy: Strategy, state: Mapping[str, Any], targets: Mapping[str, Any], *, strict: bool
) -> None:
    """Load the whole state of rank 0 into the module; each rank takes its shards, one tensor at a time; collective.

    Args:
        strategy: Has the module, and communicates.
        state: By name; only that of rank 0 counts.
        targets: What each rank holds of the module's state, by name: tensors, DTensors or FlatShards.
        strict: Whether it is an error that names are missing or unexpected; otherwise that is logged.

    Raises:
        CheckpointError: Names are missing or unexpected, or a tensor has another shape.
    """
    agree_on(strategy, lambda: misfit(strategy.module, targets, state, strict=strict))
    others = {}
    for name, target in targets.items():
        if not strategy.broadcast(name in state):
            continue
        if isinstance(target, Tensor | FlatShard) and not is_extra_state(name):
            copy_whole(target, _broadcast_tensor(state.get(name), tuple(target.shape), target.dtype, strategy))
        else:
            others[name] = strategy.broadcast(state.get(name))
    if others:
        strategy.module.load_state_dict(others, strict=False)


def scatter_optimizer_entries(
    strategy: Strategy, entries: Mapping[Key, Mapping[str, Any]], shard: Callable[[Key, Tensor], Any]
) -> dict[Key, dict[str, Any]]:
    """Return what this rank needs of the optimizer state that rank 0 has of each parameter; collective.

    Args:
        strategy: Communicates.
        entries: State of parameters, by their names or numbers, with whole tensors; only that of rank 0 counts.
        shard: Returns for a parameter what this rank keeps of a whole tensor, which is on the device.
    """
    outline = strategy.broadcast(apply_to_tensors(dict(entries), _TensorOutline.of))

    def receive(parameter: Key, key: str, value: Any) -> Any:
        if not isinstance(value, _TensorOutline):
            return value
        source = entries.get(parameter, {}).get(key)
        return shard(parameter, _broadcast_tensor(source, value.shape, value.dtype, strategy))

    return {
        parameter: {key: receive(parameter, key, value) for key, value in entry.items()}
        for parameter, entry in outline.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorOutline:
    """What the other ranks need to know of a tensor before it is broadcast."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorOutline:
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)


def _broadcast_tensor(source: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, strategy: Strategy) -> Tensor:
    """Return a tensor that rank 0 has, on the device of each rank; collective."""
    whole = torch.empty(shape, dtype=dtype, device=strategy.root_device)
    if strategy.is_global_zero and source is not None:
        whole.copy_(source)
    dist.broadcast(whole, 0)
    return whole


@torch.no_grad()
def copy_whole(target: Tensor | FlatShard, whole: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded; no rank communicates.

    Args:
        target: A tensor, or a DTensor or FlatShard of which this rank takes its elements.
        whole: Of the same shape.
    """
    if isinstance(target, FlatShard):
        target.local.copy_(target.taken_from(whole))
    elif isinstance(target, DTensor):
        for box in local_boxes(target):
            box.tensor.copy_(whole[_slices(box)])
    else:
        target.copy_(whole)


def _slices(box: LocalBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.starts, box.tensor.shape, strict=True))


# Names and numbers of parameters


def number_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by names as ``Optimizer.state_dict`` does, by numbers in the order of its groups."""
    names = chain.from_iterable(group["params"] for group in state["param_groups"])
    return _renamed(state, {name: number for number, name in enumerate(names)})


def name_parameters(state: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return what ``Optimizer.state_dict`` did by the names of parameters.

    Args:
        state: By numbers; a parameter without a name gets its number as one.
        group_names: Names of the parameters in each group.
    """
    return _renamed(state, dict(enumerate(chain.from_iterable(group_names))))


def _renamed(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    def rename(key: Any) -> Any:
        return keys.get(key, str(key))

    return {
        "state": {rename(key): entry for key, entry in state["state"].items()},
        "param_groups": [{**group, "params": list(map(rename, group["params"]))} for group in state["param_groups"]],
    }
