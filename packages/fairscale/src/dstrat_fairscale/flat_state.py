"""State of optimizers of FairScale's shards, by the names that parameters had before they were joined."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.interfaces.state_dict import group_names, groups_misfit
from dstrat_fairscale.internals import FlatParameter, original_shape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

_WRAPPERS = re.compile(r"_fsdp_wrapped_module\.|_fpw_module\.")  # which FairScale puts into names


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter of the user's module, in a tensor that FairScale shards.

    Attributes:
        name: Its name in the module as it was.
        shape: Its shape.
        start: Index of its first element in the flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int = 0

    def shard(self, local: Tensor, rank: int) -> FlatShard:
        """Return the elements of this parameter in a rank's shard of the flat tensor, as a view."""
        offset = rank * local.numel() - self.start  # of the shard, in this parameter
        numel = torch.Size(self.shape).numel()
        begin, end = (min(max(index, 0), numel) for index in (offset, offset + local.numel()))
        return FlatShard(local=local.view(-1)[begin - offset :][: end - begin], start=begin, shape=self.shape)


def pieces_of(module: Module) -> dict[Tensor, list[Piece]]:
    """Return the parameters that a module had before FairScale joined and sharded them, by the tensor they are in."""
    pieces: dict[Tensor, list[Piece]] = {}
    for wrapped_name, parameter in module.named_parameters():
        name = _WRAPPERS.sub("", wrapped_name)
        if not isinstance(parameter, FlatParameter):
            pieces[parameter] = [Piece(name=name, shape=original_shape(parameter))]
            continue
        names, shapes, sizes = parameter.metadata()
        layer = name.rpartition("flat_param_")[0]
        starts = accumulate(sizes, initial=0)
        pieces[parameter] = [
            Piece(name=layer + _WRAPPERS.sub("", inner), shape=tuple(shape), start=start)
            for inner, shape, start in zip(names, shapes, starts, strict=False)  # the last start is the end
        ]
    return pieces


def names_of_groups(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """Return the names of the parameters of each group of an optimizer, in their order."""
    pieces = pieces_of(module)
    return [
        [piece.name for parameter in group["params"] for piece in pieces[parameter]] for group in optimizer.param_groups
    ]


def sharded_state(optimizer: Optimizer, module: Module, rank: int) -> dict[str, Any]:
    """Return the state of an optimizer by the names of parameters, with this rank's shards.

    Args:
        optimizer: Has parameters of the module.
        module: The wrapped layers in the user's module.
        rank: This rank.
    """
    pieces, entries = pieces_of(module), {}
    for parameter, entry in optimizer.state.items():
        for piece in pieces[parameter]:
            entries[piece.name] = {
                # A copy, as one count of steps would be counted on for each parameter that has been loaded with it.
                key: piece.shard(value, rank) if _is_shard(value, parameter) else copy.deepcopy(value)
                for key, value in entry.items()
            }
    state, names = optimizer.state_dict(), names_of_groups(optimizer, module)
    groups = [{**group, "params": of_group} for group, of_group in zip(state["param_groups"], names, strict=True)]
    return {**state, "state": entries, "param_groups": groups}


def load_state(optimizer: Optimizer, module: Module, rank: int, state: Mapping[str, Any]) -> None:
    """Load a result of :func:`sharded_state`, or the same with full tensors.

    Raises:
        CheckpointError: It is the state of other parameters.
    """
    pieces = pieces_of(module)
    names = names_of_groups(optimizer, module)
    if (mismatch := groups_misfit(optimizer, names, group_names(state))) is not None:
        raise CheckpointError(mismatch)
    saved, numbers = state["state"], count()
    entries: dict[int, Any] = {}
    groups = []
    for group, saved_group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        numbered = dict(zip(group["params"], numbers, strict=False))  # the count goes on in the next group
        groups.append({**saved_group, "params": list(numbered.values())})
        for parameter, number in numbered.items():
            parts = [(piece, saved[piece.name]) for piece in pieces[parameter] if piece.name in saved]
            if parts:
                entries[number] = {key: _joined(key, parts, parameter, rank) for key in parts[0][1]}
    optimizer.load_state_dict({**state, "state": entries, "param_groups": groups})


def _is_shard(value: Any, parameter: Tensor) -> bool:
    """Return whether a value has an element for each of a parameter, unlike a count of steps."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _joined(key: str, parts: Sequence[tuple[Piece, Mapping[str, Any]]], parameter: Tensor, rank: int) -> Any:
    """Return this rank's shard of a value of joined parameters, of which each has a part."""
    piece, entry = parts[0]
    first = entry[key]
    if not isinstance(first, FlatShard) and not (isinstance(first, Tensor) and tuple(first.shape) == piece.shape):
        return first
    local = torch.zeros(parameter.shape, dtype=first.dtype)  # also where FairScale pads shards to one size
    for piece, entry in parts:
        shard, value = piece.shard(local, rank), entry[key]
        shard.local.copy_(value.local if isinstance(value, FlatShard) else shard.taken_from(value))
    return local
