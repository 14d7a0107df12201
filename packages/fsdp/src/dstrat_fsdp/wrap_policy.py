"""Blocks of a module that are gathered and freed together, and activation checkpointing."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dstrat.errors import ConflictError, RequestError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


_SMALL = 0.01
"""A layer without children is a block by itself from this share of all parameters on."""

WrapPolicy = type | Iterable[type] | Callable[..., bool] | int


def checked_policy(option: str, policy: Any, *, or_size: bool) -> Any:
    """Return a policy of layers, with classes as a tuple.

    Args:
        option: Name of the option.
        policy: A class of layers, or several; a function of a module; None.
        or_size: Whether a number of parameters is allowed too.

    Raises:
        RequestError: The policy is none of these.
    """
    if policy is None or (or_size and isinstance(policy, int) and not isinstance(policy, bool) and policy > 0):
        return policy
    classes = (policy,) if isinstance(policy, type) else policy
    if isinstance(classes, Iterable) and not isinstance(classes, str | nn.Module):
        classes = tuple(classes)
        if classes and all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
            return classes
    elif callable(policy) and not isinstance(policy, nn.Module):
        return policy
    size = ", or the least number of parameters of a block" if or_size else ""
    raise RequestError(
        f"{option} {policy!r} is not a class of layers such as torch.nn.TransformerEncoderLayer, several of them, a "
        f"function that returns whether it selects a module{size}"
    )


def blocks_of(module: Module, policy: WrapPolicy | None, *, root: Module | None = None) -> list[Module]:
    """Return the blocks of a module that is not sharded yet, inner ones before those that contain them.

    Args:
        module: The module; layers that it has sharded itself are skipped.
        policy: Classes of layers; a function of a module (or torch's ``auto_wrap_policy`` functions, of a module,
            ``recurse`` and ``nonwrapped_numel``); the least number of parameters of a block; None for the module's
            own ``auto_wrap_policy``, or else repeated layers.
        root: The module that this one is a stage of, whose other stages may have all the layers of the policy.

    Raises:
        RequestError: The policy matches no layer, or a block shares a parameter with a layer outside of it.
    """
    if policy is None:  # the option was checked in the constructor, before there was a module
        option = f"{type(module).__name__}.auto_wrap_policy"
        policy = checked_policy(option, getattr(module, "auto_wrap_policy", None), or_size=True)
    if policy is None:
        owners = _owners(module)
        return [block for block in _repeated(module) if not _shares_parameters(block, owners)]
    blocks = [layer for layer in _matching_policy(module, policy) if layer is not module]
    matches_elsewhere = root is not None and any(layer is not root for layer in _matching_policy(root, policy))
    if not (blocks or matches_elsewhere or any(isinstance(layer, FSDPModule) for layer in module.modules())):
        classes = ", ".join(
            sorted({type(layer).__name__ for layer in _candidate_layers(module) if layer is not module})
        )
        raise RequestError(
            f"auto_wrap_policy {policy!r} matches no layer of {type(module).__name__}, which has "
            f"{_numel(module)} parameters in layers of the classes {classes or '(none)'}"
        )
    for block in blocks:
        _refuse_shared_parameters(block, module)
    return blocks


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
    for layer in layers:
        _refuse_shared_parameters(layer, module)
    return layers


def _callable_layers(module: Module) -> Iterator[Module]:
    if has_forward(module):
        if _numel(module) and not isinstance(module, FSDPModule):
            yield module
    else:
        for child in module.children():
            yield from _callable_layers(child)


def layers_of_classes(module: Module, classes: Iterable[type]) -> list[Module]:
    """Return the layers of a module that are of one of the classes, inner ones first."""
    accepted = tuple(classes)
    return [layer for layer in _candidate_layers(module) if isinstance(layer, accepted)]


def has_forward(module: Module) -> bool:
    """Return whether a module can be called, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward


def _matching_policy(module: Module, policy: WrapPolicy) -> list[Module]:
    if isinstance(policy, int):
        return _by_size(module, lambda _, numel: numel >= policy)
    if not callable(policy):
        return layers_of_classes(module, policy)
    function: Any = policy
    # torch's functions, and those that are written for its earlier FSDP, take these arguments by name.
    names = inspect.signature(function).parameters
    if "nonwrapped_numel" in names or "recurse" in names:
        return _by_size(module, lambda layer, numel: function(layer, recurse=False, nonwrapped_numel=numel))
    return [layer for layer in _candidate_layers(module) if function(layer)]


def _candidate_layers(module: Module) -> Iterator[Module]:
    """Yield the layers that can be sharded and have parameters, inner ones first."""
    sharded = {id(p) for unit in module.modules() if isinstance(unit, FSDPModule) for p in unit.modules()}
    for layer in reversed(list(module.modules())):  # torch's order has outer modules first
        if has_forward(layer) and id(layer) not in sharded and _numel(layer):
            yield layer


def _by_size(module: Module, is_block: Callable[[Module, int], bool]) -> list[Module]:
    """Return the blocks that a function selects by the number of parameters outside of inner blocks."""
    blocks: list[Module] = []
    for layer in _candidate_layers(module):
        inner = {id(p) for block in blocks for p in block.parameters()}
        if is_block(layer, sum(p.numel() for p in layer.parameters() if id(p) not in inner)):
            blocks.append(layer)
    return blocks


def _repeated(module: Module) -> list[Module]:
    # Layers with children first, such as those of a transformer; a plain sequence has none.
    # Each once: a layer may have several names, such as those of a model that its loss contains too.
    blocks = dict.fromkeys(_siblings(module, lambda layer: any(True for _ in layer.children())))
    least = _SMALL * _numel(module)
    return list(blocks or dict.fromkeys(_siblings(module, lambda layer: _numel(layer) >= least)))


def _siblings(module: Module, is_candidate: Callable[[Module], bool]) -> Iterator[Module]:
    """Yield layers that have siblings of their class, outermost ones only."""
    if isinstance(module, FSDPModule):
        return
    children = list(module.children())
    candidates = [c for c in children if has_forward(c) and _numel(c) and not isinstance(c, FSDPModule)]
    candidates = [child for child in candidates if is_candidate(child)]
    count = Counter(map(type, candidates))
    repeated = [child for child in candidates if count[type(child)] > 1]
    yield from repeated
    for child in children:
        if not any(child is other for other in repeated):
            yield from _siblings(child, is_candidate)


def _refuse_shared_parameters(block: Module, module: Module) -> None:
    shared = _shared_parameters(block, module)
    if shared:
        raise RequestError(
            f"a {type(block).__name__} that is sharded by itself shares its parameter {shared[0]!r} with a layer "
            "outside of it: shard a layer that contains both, or exclude it from auto_wrap_policy"
        )


def _shared_parameters(block: Module, module: Module) -> list[str]:
    """Return the names, within the block, of parameters that a layer outside of it shares."""
    inside = {id(layer) for layer in block.modules()}
    outside = {
        id(parameter)
        for layer in module.modules()
        if id(layer) not in inside
        for parameter in layer.parameters(recurse=False)
    }
    # Scalars are sharded with no block, so that any layers may share them.
    return [name for name, parameter in block.named_parameters() if id(parameter) in outside and parameter.dim()]


def _owners(module: Module) -> Counter[int]:
    """Return how many layers have each parameter, but for scalars, by its identity."""
    return Counter(id(one) for layer in module.modules() for one in layer.parameters(recurse=False) if one.dim())


def _shares_parameters(block: Module, owners: Counter[int]) -> bool:
    """Return whether a layer outside of a block has a parameter of it.

    Args:
        block: The block.
        owners: Numbers of layers with each parameter.
    """
    return any(count < owners[parameter] for parameter, count in _owners(block).items())


def _numel(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers_with_statistics(module: Module) -> list[Module]:
    """Return the layers of a module with running statistics that are not sharded yet."""
    layers = [layer for layer in module.modules() if layer is not module and keeps_statistics(layer)]
    return [layer for layer in layers if not isinstance(layer, FSDPModule) and not _shared_parameters(layer, module)]


def keeps_statistics(layer: Module) -> bool:
    """Return whether a layer has parameters beside running statistics, as batch norm has."""
    return getattr(layer, "running_mean", None) is not None and any(True for _ in layer.parameters(recurse=False))


def running_statistics(module: Module) -> list[Tensor]:
    """Return the buffers of the layers with running statistics, without sharded ones."""
    layers = [layer for layer in module.modules() if getattr(layer, "running_mean", None) is not None]
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    return [buffer for buffer in buffers if not isinstance(buffer, DTensor)]


# Activation checkpointing


LayerClasses = type | Iterable[type]
LayerPolicy = Iterable[type] | Callable[["Module"], bool]


class ActivationCheckpointing:
    """Activation checkpointing of some layers, which compute their activations again in the backward pass.

    ``forward`` is replaced on the instances.  A wrapper module would change the names of parameters.

    Args:
        classes: A class of layers, or several.
        policy: Classes of layers, or a function that returns whether it selects a module.

    Raises:
        ConflictError: Both are passed.
        RequestError: A value of another type is passed.
    """

    def __init__(self, classes: LayerClasses | None, policy: LayerPolicy | None) -> None:
        if classes is not None and policy is not None:
            raise ConflictError(
                "activation_checkpointing and activation_checkpointing_policy both select layers: leave one out"
            )
        name = "activation_checkpointing" if policy is None else "activation_checkpointing_policy"
        self._policy = checked_policy(name, policy if classes is None else classes, or_size=False)
        self._layers: list[Module] = []

    def apply(self, module: Module) -> None:
        """Checkpoint the activations of the selected layers of a module.

        Raises:
            RequestError: The module has no such layers.
        """
        if self._policy is None:
            return
        if callable(self._policy):
            self._layers = [layer for layer in module.modules() if self._policy(layer)]
        else:
            self._layers = layers_of_classes(module, self._policy)
        if not self._layers:
            raise RequestError(
                f"activation checkpointing of {self._policy!r} matches no layer of {type(module).__name__}"
            )
        for layer in self._layers:
            forward = layer.forward
            # The reentrant way computes no gradients where no input of the layer requires one.
            layer.forward = functools.wraps(forward)(functools.partial(checkpoint, forward, use_reentrant=False))

    def undo(self) -> None:
        """Restore the ``forward`` of the layers."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._layers = []
