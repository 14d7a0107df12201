"""Blocks of a module that are gathered and freed together."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule

from dstrat.errors import RequestError
from dstrat.parallel.layers import (
    checked_policy,
    has_forward,
    is_compiled,
    num_parameters,
    repeated_layers,
    uncompiled,
)

if TYPE_CHECKING:
    from torch.nn import Module

WrapPolicy = type | Iterable[type] | Callable[..., bool] | int


def blocks_of(module: Module, policy: WrapPolicy | None, *, root: Module | None = None) -> list[Module]:
    """Return the blocks of a module that is not sharded yet, inner ones before those that contain them.

    Args:
        module: The module; layers that it has sharded itself are skipped.
        policy: Classes of layers; a function of a module (or torch's ``auto_wrap_policy`` functions, of a module,
            ``recurse`` and ``nonwrapped_numel``); the least number of parameters of a block; None for the module's
            own ``auto_wrap_policy``, or else repeated layers.  One that matches the module itself may match no layer:
            all parameters are then gathered for a full step.
        root: The module that this one is a stage of, whose other stages may have all the layers of the policy.

    Raises:
        RequestError: The policy matches no layer, or a block shares a parameter with a layer outside of it.
    """
    if policy is None:  # the option was checked in the constructor, before there was a module
        option = f"{type(module).__name__}.auto_wrap_policy"
        policy = checked_policy(option, getattr(module, "auto_wrap_policy", None), or_size=True)
    if policy is None:
        return list(dict.fromkeys(_repeated_blocks(module, parameter_uses(module))))  # one may be in several of them
    matching = _matching_policy(module, policy)
    blocks = [layer for layer in matching if layer is not module]
    matches_elsewhere = root is not None and bool(_matching_policy(root, policy))
    if not (matching or matches_elsewhere or any(isinstance(layer, FSDPModule) for layer in module.modules())):
        classes = ", ".join(
            sorted({type(layer).__name__ for layer in _candidate_layers(module) if layer is not module})
        )
        raise RequestError(
            f"auto_wrap_policy {policy!r} matches no layer of {type(module).__name__}, which has "
            f"{num_parameters(module)} parameters in layers of the classes {classes or '(none)'}"
        )
    _refuse_shared_parameters(blocks, module)
    return blocks


def _repeated_blocks(module: Module, uses: Counter[int]) -> Iterator[Module]:
    """Yield repeated layers, or those within one that shares parameters with a layer outside of it."""
    for layer in repeated_layers(module, lambda layer: isinstance(layer, FSDPModule)):
        if names_of_shared(layer, uses):
            yield from _repeated_blocks(layer, uses)
        else:
            yield layer


def outermost_layers(module: Module) -> list[Module]:
    """Return the outermost layers with a forward, which together have all parameters.

    Raises:
        RequestError: A parameter is in no such layer, or in several.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        raise RequestError(
            f"{type(module).__name__} optimizes manually, and its parameter {names[0]!r} is in no layer whose forward "
            "could gather it: move it into one"
        )
    layers = list(dict.fromkeys(layer for child in module.children() for layer in _callable_layers(child)))
    _refuse_shared_parameters(layers, module)
    return layers


def _callable_layers(module: Module) -> Iterator[Module]:
    if has_forward(module):
        if num_parameters(module) and not isinstance(module, FSDPModule):
            yield module
    else:
        for child in module.children():
            yield from _callable_layers(child)


def _matching_policy(module: Module, policy: WrapPolicy) -> list[Module]:
    if isinstance(policy, int):
        return _by_size(module, lambda _, numel: numel >= policy)
    if not callable(policy):
        classes = tuple(policy)
        return [layer for layer in _candidate_layers(module) if isinstance(uncompiled(layer), classes)]
    function: Any = policy
    # torch's functions, and those that are written for its earlier FSDP, take these arguments by name.
    names = inspect.signature(function).parameters
    if "nonwrapped_numel" in names or "recurse" in names:
        return _by_size(module, lambda layer, numel: function(uncompiled(layer), recurse=False, nonwrapped_numel=numel))
    return [layer for layer in _candidate_layers(module) if function(uncompiled(layer))]


def _candidate_layers(module: Module) -> Iterator[Module]:
    """Yield the layers that can be sharded and have parameters, inner ones first.

    A compiled layer is sharded outside of its graph, which the hooks that gather its parameters would break.
    """
    excluded = {id(p) for unit in module.modules() if isinstance(unit, FSDPModule) for p in unit.modules()}
    excluded |= {id(uncompiled(layer)) for layer in module.modules() if is_compiled(layer)}
    for layer in reversed(list(module.modules())):  # torch's order has outer modules first
        # The module itself may have steps only: it is gathered for these.
        if (layer is module or has_forward(layer)) and id(layer) not in excluded and num_parameters(layer):
            yield layer


def _by_size(module: Module, is_block: Callable[[Module, int], bool]) -> list[Module]:
    """Return the blocks that a function selects by the number of parameters outside of inner blocks."""
    blocks: list[Module] = []
    for layer in _candidate_layers(module):
        inner = {id(p) for block in blocks for p in block.parameters()}
        if is_block(layer, sum(p.numel() for p in layer.parameters() if id(p) not in inner)):
            blocks.append(layer)
    return blocks


def _refuse_shared_parameters(blocks: Iterable[Module], module: Module) -> None:
    uses, blocks = parameter_uses(module), list(blocks)
    for block in blocks:
        inner = [layer for layer in block.modules() if any(layer is one for one in blocks) and layer is not block]
        in_inner = {id(parameter) for layer in inner for parameter in layer.parameters()}
        parameters = dict(block.named_parameters())
        if shared := [name for name in names_of_shared(block, uses) if id(parameters[name]) not in in_inner]:
            raise RequestError(
                f"a {type(block).__name__} that is sharded by itself shares its parameter {shared[0]!r} with a layer "
                "outside of it: shard a layer that contains both, or exclude it from auto_wrap_policy"
            )


def parameter_uses(module: Module) -> Counter[int]:
    """Return in how many ways a module contains each layer and each parameter, by their identities.

    A layer that several others contain, as that of a network beside its wrapper, counts once for each.
    """
    uses: Counter[int] = Counter()

    def count(layer: Module, above: frozenset[int]) -> None:
        uses[id(layer)] += 1
        uses.update(id(parameter) for parameter in layer.parameters(recurse=False))
        for child in layer.children():
            if id(child) not in above:  # it may contain itself
                count(child, above | {id(child)})

    count(module, frozenset([id(module)]))
    return uses


def names_of_shared(block: Module, uses: Counter[int]) -> list[str]:
    """Return the names of a block's parameters that a layer outside of it has too.

    Args:
        block: The block.
        uses: The :func:`parameter_uses` of the module.
    """
    inside, times = parameter_uses(block), uses[id(block)]
    # Scalars are sharded with no block, so that any layers may share them.
    return [name for name, one in block.named_parameters() if one.dim() and times * inside[id(one)] < uses[id(one)]]


def layers_with_statistics(module: Module) -> list[Module]:
    """Return the layers of a module with running statistics that are not sharded yet."""
    uses = parameter_uses(module)
    layers = [layer for layer in module.modules() if layer is not module and keeps_statistics(layer)]
    return [layer for layer in layers if not isinstance(layer, FSDPModule) and not names_of_shared(layer, uses)]


def keeps_statistics(layer: Module) -> bool:
    """Return whether a layer has parameters beside running statistics, as batch norm has."""
    return getattr(layer, "running_mean", None) is not None and any(True for _ in layer.parameters(recurse=False))
