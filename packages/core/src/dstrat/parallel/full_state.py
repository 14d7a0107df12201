"""Full state of a sharded module and its optimizers: gathered on rank 0, scattered from rank 0."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.interfaces.state_dict import (
    group_names,
    groups_misfit,
    has_standard_layout,
    is_extra_state,
    is_streamed,
    misfit,
    name_parameters,
    number_parameters,
)
from dstrat.interfaces.strategy import gather_if_different, gather_objects
from dstrat.parallel.collectives import uses_host_memory
from dstrat.parallel.shards import TensorOutline, holders, local_boxes, with_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Strategy
    from dstrat.parallel.shards import LocalBox


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
    gathered: dict[str, Any] = _Gathering(strategy).gather(state)
    return gathered if strategy.is_global_zero else {}


def gather_entries(entries: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return the full entries of all ranks on the CPU of rank 0, and an empty dict on the other ranks; collective.

    Args:
        entries: State of this rank by the names of parameters and buffers.  A rank may have some of the names only, as
            a stage of a pipeline has, or a rank that owns some parameters.
        strategy: Has the rank and the device.
    """
    gathered = dict(_Gathering(strategy).entries(entries))
    return gathered if strategy.is_global_zero else {}


def stream_tensors(
    entries: Mapping[str, Any],
    strategy: Strategy,
    *,
    everywhere: bool = False,
    selects: Callable[[str], bool] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of all ranks one after the other, on the device; collective until its end.

    Args:
        entries: Tensors of this rank by name, as in :func:`gather_entries`; extra states are left out.
        strategy: Has the rank and the device.
        everywhere: Whether every rank gets the tensors, or rank 0 alone.
        selects: Returns whether the tensor of a name is wanted, the same on each rank; None for all.
    """
    tensors = {name: value for name, value in entries.items() if is_streamed(name, selects)}
    for name, full in _Gathering(strategy, everywhere=everywhere, on_host=False).entries(tensors):
        if full is not None:
            yield name, full


@dataclass(frozen=True, slots=True)
class _Gathering:
    """Full tensors, gathered one by one.

    Attributes:
        strategy: Has the rank and the device.
        everywhere: Whether every rank gets them, or rank 0.
        on_host: Whether they are moved to the CPU, or are on the rank's device.
    """

    strategy: Strategy
    everywhere: bool = False
    on_host: bool = True

    def entries(self, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the entries of all ranks by name, in the same order on each; collective."""
        strategy = self.strategy
        local_names = list(entries)
        names = strategy.broadcast(local_names)
        common = set(names)
        names_of_ranks = gather_if_different(strategy, local_names, differs=common != entries.keys())
        if names_of_ranks is not None:
            common.intersection_update(*names_of_ranks)
        for name in names:
            if name in common:
                yield name, self.gather(entries[name])
        if names_of_ranks is not None:
            yield from self._boxes({name: entries[name] for name in entries if name not in common})

    def gather(self, value: Any) -> Any:
        """Return a nested state with full tensors, which every rank has; None for each where it is not wanted."""
        if isinstance(value, Mapping):
            return {key: self.gather(inner) for key, inner in value.items()}
        if isinstance(value, FlatShard):
            full = torch.zeros(value.shape, dtype=value.dtype, device=_device(self.strategy))
            value.taken_from(full).copy_(value.local)
            return self._received(self._sum(full))
        return apply_to_tensors(
            value, lambda tensor: self._received(full_tensor(tensor) if isinstance(tensor, DTensor) else tensor)
        )

    @torch.no_grad()
    def _boxes(self, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the full entries of which ranks have different ones; collective."""
        local = dict(_leaves(state))
        outlines = gather_objects(self.strategy, {path: _outline_and_boxes(value) for path, value in local.items()})
        paths = sorted(set().union(*outlines))
        for name, paths_of_name in itertools.groupby(paths, key=itemgetter(0)):
            entry: dict[str, Any] = {}
            for path in paths_of_name:
                versions = {rank: outline[path] for rank, outline in enumerate(outlines) if path in outline}
                value = next(iter(versions.values()))[0]
                if isinstance(value, TensorOutline):
                    full = torch.zeros(value.shape, dtype=value.dtype, device=_device(self.strategy))
                    for box in local_boxes(local[path]) if path in local else ():
                        # Of the ranks that have the same box, the first one sends it.
                        sender = next(rank for rank, (_, boxes) in versions.items() if _extent(box) in boxes)
                        if sender == self.strategy.global_rank:
                            full[box.slices] = box.tensor
                    value = self._received(self._sum(full))
                elif isinstance(value, Tensor):
                    value = self._received(value)
                *parents, key = path
                inner = entry
                for parent in parents:
                    inner = inner.setdefault(parent, {})
                inner[key] = value
            yield name, entry[name]

    def _sum(self, full: Tensor) -> Tensor:
        """Add tensors whose elements are non-zero on one rank only; collective."""
        # As bytes: their sum is exact for every dtype, also for those that the backend cannot reduce.
        content = full.view(-1).view(torch.uint8)
        if self.everywhere:
            dist.all_reduce(content)
        else:
            dist.reduce(content, 0)
        return full

    def _received(self, full: Tensor) -> Tensor | None:
        if not (self.everywhere or self.strategy.is_global_zero):
            return None
        return full.detach().to("cpu" if self.on_host else self.strategy.root_device)


def _leaves(state: Mapping[str, Any], *parents: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested mappings by their paths."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, *parents, key)
        else:
            yield (*parents, key), value


def _outline_and_boxes(value: Any) -> tuple[Any, frozenset[Any]]:
    """Return the outline of a tensor and this rank's boxes; another value, and a scalar on the CPU, as it is."""
    if not isinstance(value, Tensor | FlatShard) or not value.shape:
        # Each rank has the whole of a scalar, also of a DTensor.
        return apply_to_tensors(
            value, lambda tensor: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()
        ), frozenset()
    outline = TensorOutline(shape=tuple(value.shape), dtype=value.dtype)
    return outline, frozenset(map(_extent, local_boxes(value)))


def _extent(box: LocalBox) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.starts, tuple(box.tensor.shape)


def gather_optimizer_state(state: Mapping[str, Any], strategy: Strategy) -> dict[str, Any]:
    """Return the full state of an optimizer on rank 0, and an empty dict on the other ranks; collective.

    Args:
        state: A state of :meth:`~dstrat.interfaces.strategy.Strategy.sharded_optimizer_state`.
        strategy: Has the rank and the device.
    """
    if not has_standard_layout(state):
        return gather_state(state, strategy)
    entries = gather_entries(state["state"], strategy)
    gathered = gather_state({**state, "state": {}}, strategy)
    return number_parameters({**gathered, "state": entries}) if strategy.is_global_zero else {}


@torch.no_grad()
def full_tensor(sharded: DTensor) -> Tensor:
    """Return the full tensor of a DTensor, on each rank of its mesh and on its device; collective over the mesh."""
    if not any(getattr(placement, "split_factor", 1) > 1 for placement in sharded.placements):
        full: Tensor = sharded.full_tensor()
        return full
    # torch 2.9 gathers rows in a wrong order if two dimensions of the mesh shard one dimension of the tensor unevenly
    # (split_factor).  A sum of bytes, to which one rank adds each box, does not depend on an order.
    sum_of_boxes = torch.zeros(sharded.shape, dtype=sharded.dtype, device=sharded.device)
    if holders(sharded)[0] == dist.get_rank():
        for box in local_boxes(sharded):
            sum_of_boxes[box.slices] = box.tensor
    # Not over all ranks: each stage of a pipeline may have the tensor, over a mesh of its own.
    for group in sharded.device_mesh.get_all_groups():
        dist.all_reduce(sum_of_boxes.view(torch.uint8), group=group)
    return sum_of_boxes


# Scattering


def scatter_module_state(
    strategy: Strategy, state: Mapping[str, Any], targets: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Load the full state of rank 0 into a module: each rank copies its shards, one tensor at a time; collective.

    It returns the targets, and for extra states and others that cannot be copied into a target the values of rank 0:
    a state for :meth:`~dstrat.interfaces.strategy.Strategy.load_sharded_module_state`.

    Args:
        strategy: Has the module, the rank and the device.
        state: The full state by name; ignored on all ranks but rank 0.
        targets: This rank's tensors, DTensors or FlatShards of the module's state, by name.
        strict: Whether missing and unexpected names are an error; otherwise they are logged.

    Raises:
        CheckpointError: Names are missing or unexpected, or a tensor has another shape.
    """
    tensors = {
        name: target
        for name, target in targets.items()
        if isinstance(target, Tensor | FlatShard) and not is_extra_state(name)
    }
    local: dict[str, Any] = dict.fromkeys(targets)
    local |= {name: TensorOutline(shape=tuple(one.shape), dtype=one.dtype) for name, one in tensors.items()}
    outline = dict(strategy.broadcast(local))  # of the targets of all ranks
    for outline_of_rank in gather_if_different(strategy, local, differs=outline != local) or ():
        outline |= outline_of_rank
    agree_on(strategy, lambda: misfit(strategy.module, outline, state, strict=strict))
    # Nothing is returned of names that this rank does not have.
    template: dict[str, Any] = dict.fromkeys(outline) | {name: {} for name in targets} | tensors
    filled = scatter_state(strategy, {name: state[name] for name in outline if name in state}, template)
    extra = {name: value for name, value in filled.items() if name not in tensors}
    if extra:  # extra states, and values that are not tensors
        strategy.module.load_state_dict(extra, strict=False)
    return {**targets, **extra}


def scatter_optimizer_state(strategy: Strategy, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's shards of the full state of an optimizer, by the names of its parameters; collective.

    Args:
        strategy: Has the optimizer's template, the rank and the device.
        optimizer: The optimizer, which is not changed.
        state: A result of :func:`gather_optimizer_state`; ignored on all ranks but rank 0.

    Raises:
        CheckpointError: It is the state of other parameters.
    """
    names = strategy.parameter_names(optimizer)

    def find_mismatch() -> str | None:
        return groups_misfit(optimizer, names, group_names(state)) if has_standard_layout(state) else None

    agree_on(strategy, find_mismatch)
    if strategy.is_global_zero and has_standard_layout(state):
        state = name_parameters(state, names)
    return scatter_state(strategy, state, strategy.optimizer_template(optimizer))


def scatter_state(strategy: Strategy, state: Mapping[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's shards of the full state of rank 0; collective.

    Args:
        strategy: Has the rank and the device.
        state: A nested state; ignored on all ranks but rank 0.
        template: This rank's tensors, DTensors or FlatShards at the same paths, which are overwritten and returned.
            A tensor that it lacks, or has in another shape, is returned in full; below a None nothing is returned.
    """
    outline = strategy.broadcast(_outline(state))

    def receive(value: Any, source: Any, target: Any) -> Any:
        if isinstance(value, Mapping):
            source, target = source or {}, {} if target is None else target
            received = {}
            for key, inner in value.items():
                # Received also where it is not wanted, as the other ranks take part.
                tensors = receive(inner, source.get(key), target.get(key, {}))
                if target.get(key, {}) is not None:
                    received[key] = tensors
            return received
        full = _broadcast_tensor(source, value, strategy) if isinstance(value, TensorOutline) else value
        if isinstance(full, Tensor) and isinstance(target, Tensor | FlatShard) and target.shape == full.shape:
            copy_full(target, full)
            return target
        return full

    scattered: dict[str, Any] = receive(outline, state, template)
    return scattered


def _outline(value: Any) -> Any:
    """Return a nested state with an outline of each tensor in it, but that of scalars and of lists complete."""
    if isinstance(value, Mapping):
        return {key: _outline(inner) for key, inner in value.items()}
    if isinstance(value, Tensor) and value.dim():
        return TensorOutline(shape=tuple(value.shape), dtype=value.dtype)
    # Sent at once, and left on the CPU, such as counts of steps: optimizers read these in each step, and move others to
    # their parameter when they load them.  A copy, as the optimizer counts on in the tensor that it loads.
    return apply_to_tensors(value, lambda tensor: tensor.to("cpu", copy=True))


def _broadcast_tensor(source: Tensor | None, outline: TensorOutline, strategy: Strategy) -> Tensor:
    """Return rank 0's tensor on the device of each rank; collective."""
    full = torch.empty(outline.shape, dtype=outline.dtype, device=_device(strategy))
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
            box.tensor.copy_(full[box.slices])
    else:
        target.copy_(full)


def shard_like(sharded: DTensor, full: Tensor) -> DTensor:
    """Return a full tensor sharded like another, without communication.

    Args:
        sharded: The other tensor, which defines the shard and its device.
        full: The full tensor of the same shape, on every rank.
    """
    shard: Any = with_local(sharded, torch.empty_like(sharded.to_local(), dtype=full.dtype))
    copy_full(shard, full)
    return shard  # type: ignore[no-any-return]  # a DTensor, as the other


def shard_entries(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return an optimizer's state with this rank's shards instead of full tensors; not collective.

    Args:
        state: The state by the names of parameters, the same on every rank; sharded tensors stay as they are.
        parameters: The parameters by name; full tensors of the shape of a DTensor are sharded like it.  What is left
            of the state of those on the meta device, which other ranks have, is dropped.
    """

    def as_shard(parameter: Tensor | None, key: str, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        # The count of steps, which optimizers read on the CPU, has the shape of a scalar parameter.
        is_like = value.shape == parameter.shape and key != "step"
        return shard_like(parameter, value) if is_like else value

    entries = {
        name: {key: as_shard(parameters.get(name), key, value) for key, value in entry.items()}
        for name, entry in state["state"].items()
        if name not in parameters or not parameters[name].is_meta
    }
    return {**state, "state": entries}


def _device(strategy: Strategy) -> torch.device:
    """Return the device on which torch.distributed communicates."""
    return torch.device("cpu") if uses_host_memory() else strategy.root_device
