"""Full state of a sharded module and its optimizers: gathered on rank 0, scattered from rank 0."""

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
from dstrat.interfaces.state_dict import groups_misfit, is_extra_state, misfit, named_state
from dstrat.interfaces.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from dstrat.checkpoint.portable.shards import LocalBox

Key = TypeVar("Key")


def agree_on(strategy: Strategy, find_problem: Callable[[], str | None]) -> None:
    """Raise an error of rank 0 on every rank, so that the others do not wait for rank 0 in a collective; collective.

    Args:
        strategy: Broadcasts the result of the check.
        find_problem: Called on rank 0 only, which alone has the full state; returns a message, or None.

    Raises:
        CheckpointError: ``find_problem`` returned a message.
    """
    problem = strategy.broadcast(find_problem() if strategy.is_global_zero else None)
    if problem is not None:
        raise CheckpointError(problem)


# Gathering


def gather_state(state: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return the full state on the CPU of rank 0, and an empty dict on the other ranks; collective.

    Tensors are gathered one by one, so that the device holds at most one full tensor at a time.

    Args:
        state: A nested state with the same structure on every rank, whose shards are DTensors or FlatShards.
        strategy: Has the rank and the device.
    """

    def gather_tensor(tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        return full.detach().cpu() if strategy.is_global_zero else None

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: gather(inner) for key, inner in value.items()}
        if isinstance(value, FlatShard):
            return gather_tensor(_sum_on_rank_0(value, strategy.root_device))
        return apply_to_tensors(value, gather_tensor)

    gathered: dict[str, Any] = gather(state)
    return gathered if strategy.is_global_zero else {}


def _sum_on_rank_0(shard: FlatShard, device: torch.device) -> Tensor:
    full = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
    shard.taken_from(full).copy_(shard.local)
    # As bytes, since each element is non-zero on one rank only: a sum of bytes is exact for every dtype, also for
    # those that the backend cannot reduce.
    dist.reduce(full.view(-1).view(torch.uint8), 0)
    return full


@torch.no_grad()
def full_tensor(sharded: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, on every rank and on its device; collective over all ranks of the job."""
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in sharded.placements):
        full: Tensor = sharded.full_tensor()
        return full
    # torch 2.9 gathers rows in a wrong order if two dimensions of the mesh shard one dimension of the tensor unevenly
    # (split_factor).  A sum of bytes, to which one rank adds each box, does not depend on an order.
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
    """Load the full state of rank 0 into a module: each rank copies its shards, one tensor at a time; collective.

    Args:
        strategy: Has the module, the rank and the device.
        state: The full state by name; ignored on all ranks but rank 0.
        targets: This rank's tensors, DTensors or FlatShards of the module's state, by name.
        strict: Whether missing and unexpected names are an error; otherwise they are logged.

    Raises:
        CheckpointError: Names are missing or unexpected, or a tensor has another shape.
    """
    agree_on(strategy, lambda: misfit(strategy.module, targets, state, strict=strict))
    replicated = {}  # extra states, and values that are not tensors
    for name, target in targets.items():
        if not strategy.broadcast(name in state):
            continue
        if isinstance(target, Tensor | FlatShard) and not is_extra_state(name):
            copy_full(target, _broadcast_tensor(state.get(name), tuple(target.shape), target.dtype, strategy))
        else:
            replicated[name] = strategy.broadcast(state.get(name))
    if replicated:
        strategy.module.load_state_dict(replicated, strict=False)


def scatter_optimizer_entries(
    strategy: Strategy, entries: Mapping[Key, Mapping[str, Any]], shard: Callable[[Key, Tensor], Any]
) -> dict[Key, dict[str, Any]]:
    """Return this rank's shards of the full optimizer state of rank 0; collective.

    Args:
        strategy: Has the rank and the device.
        entries: Full state of each parameter, by name or number; ignored on all ranks but rank 0.
        shard: Returns this rank's shard for a parameter and a full tensor on the device, or a scalar on the CPU.
    """

    # Scalars are sent at once, and stay on the CPU, such as counts of steps: optimizers read these in each step, and
    # move the others to their parameter when they load them.
    def outline_of(value: Tensor) -> _TensorOutline | Tensor:
        # A copy, as the optimizer counts on in the tensor that it loads.
        return _TensorOutline.of(value) if value.dim() else value.to("cpu", copy=True)

    outline = strategy.broadcast(apply_to_tensors(dict(entries), outline_of))

    def receive(parameter: Key, key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return shard(parameter, value)
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
    """Shape and dtype of a tensor, which the other ranks need to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _TensorOutline:
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype)


def _broadcast_tensor(source: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, strategy: Strategy) -> Tensor:
    """Return rank 0's tensor on the device of each rank; collective."""
    full = torch.empty(shape, dtype=dtype, device=strategy.root_device)
    if strategy.is_global_zero and source is not None:
        full.copy_(source)
    dist.broadcast(full, 0)
    return full


@torch.no_grad()
def copy_full(target: Tensor | FlatShard, full: Tensor) -> None:
    """Copy a full tensor into a tensor that may be sharded; not collective.

    Args:
        target: A tensor, or a DTensor or FlatShard, of which this rank's elements are set.
        full: The full tensor, of the same shape.
    """
    if isinstance(target, FlatShard):
        target.local.copy_(target.taken_from(full))
    elif isinstance(target, DTensor):
        for box in local_boxes(target):
            box.tensor.copy_(full[_slices(box)])
    else:
        target.copy_(full)


def _slices(box: LocalBox) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.starts, box.tensor.shape, strict=True))


# Optimizers of strategies that define the state of their ranks only


def full_optimizer_state(strategy: Strategy, optimizer: Optimizer) -> dict[str, Any]:
    """Return the full state of an optimizer, on global rank 0 only if ranks have parts of it; collective.

    It is gathered from ``sharded_optimizer_state``, unless the strategy defines ``optimizer_state``.  Entries of
    parameters may be sharded, or exist on one rank each.
    """
    if strategy.replicates_state or type(strategy).optimizer_state is not Strategy.optimizer_state:
        return strategy.optimizer_state(optimizer)
    named = strategy.sharded_optimizer_state(optimizer)
    names = [strategy.broadcast(sorted(named["state"]), src=rank) for rank in range(strategy.world_size)]
    common = set(names[0]).intersection(*names)
    entries = gather_state({name: named["state"][name] for name in sorted(common)}, strategy)
    for rank, names_of_rank in enumerate(names):  # the entries of one rank at a time
        local = {}
        if rank == strategy.global_rank:
            local = {name: named["state"][name] for name in names_of_rank if name not in common}
        if common.issuperset(names_of_rank):
            continue
        received = strategy.broadcast(apply_to_tensors(local, Tensor.cpu), src=rank)
        if strategy.is_global_zero:
            entries |= received
    return number_parameters({**named, "state": entries}) if strategy.is_global_zero else {}


def load_full_optimizer_state(strategy: Strategy, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`full_optimizer_state`; collective.

    Raises:
        CheckpointError: It is the state of other parameters.
    """
    if strategy.replicates_state or type(strategy).load_optimizer_state is not Strategy.load_optimizer_state:
        strategy.load_optimizer_state(optimizer, state)
        return
    received = strategy.broadcast(dict(state))
    current = named_state(optimizer, strategy.module)["param_groups"]
    names, saved = ([group["params"] for group in groups] for groups in (current, received["param_groups"]))
    if (mismatch := groups_misfit(optimizer, names, saved)) is not None:
        raise CheckpointError(mismatch)
    strategy.load_sharded_optimizer_state(optimizer, name_parameters(received, names))


# Names and numbers of parameters


def number_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parameters by number, as in ``Optimizer.state_dict``, instead of by name."""
    names = chain.from_iterable(group["params"] for group in state["param_groups"])
    return _renamed(state, {name: number for number, name in enumerate(names)})


def name_parameters(state: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the result of ``Optimizer.state_dict`` with parameters by name instead of by number.

    Args:
        state: By number; a parameter without a name is called by its number.
        group_names: Names of the parameters in each group.
    """
    return _renamed(state, dict(enumerate(chain.from_iterable(group_names))))


def _renamed(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    def rename(key: Any) -> Any:
        return keys.get(key, str(key))

    return {
        **state,
        "state": {rename(key): entry for key, entry in state["state"].items()},
        "param_groups": [{**group, "params": list(map(rename, group["params"]))} for group in state["param_groups"]],
    }
