"""Layers of a module: selection by class, by a function, or of repeated ones, and their modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn import Module

from dstrat.errors import RequestError

LayerClasses = type | Iterable[type]
LayerPolicy = Iterable[type] | Callable[[Module], bool]

_SMALL = 0.01
"""A layer without children counts as repeated from this share of all parameters on."""


def checked_policy(option: str, policy: Any, *, or_size: bool = False, or_values: tuple[str, ...] = ()) -> Any:
    """Return a policy of layers, with classes as a tuple.

    Args:
        option: Name of the option.
        policy: A class of layers, or several; a function of a module; None.
        or_size: Whether a number of parameters is allowed too.
        or_values: Further values that are allowed, for the message.

    Raises:
        RequestError: The policy is none of these.
    """
    if policy is None or (or_size and isinstance(policy, int) and not isinstance(policy, bool) and policy > 0):
        return policy
    classes = (policy,) if isinstance(policy, type) else policy
    if isinstance(classes, Iterable) and not isinstance(classes, str | Module):
        classes = tuple(classes)
        if classes and all(isinstance(one, type) and issubclass(one, Module) for one in classes):
            return classes
    elif callable(policy) and not isinstance(policy, Module):
        return policy
    possible = [
        *or_values,
        "a class of layers such as torch.nn.TransformerEncoderLayer",
        "several of them",
        "a function that returns whether it selects a module",
        *(["the least number of parameters of a block"] if or_size else []),
    ]
    raise RequestError(f"{option} {policy!r} is not {', '.join(possible[:-1])}, or {possible[-1]}")


def selected_layers(module: Module, policy: LayerPolicy) -> list[Module]:
    """Return the layers of a module that a policy selects, inner ones before those that contain them.

    Args:
        module: The module.
        policy: A result of :func:`checked_policy`.
    """
    # torch's order has outer modules first.
    layers = [layer for layer in reversed(list(module.modules())) if has_forward(layer) and not is_compiled(layer)]
    if callable(policy):
        return [layer for layer in layers if policy(layer)]
    classes = tuple(policy)
    return [layer for layer in layers if isinstance(layer, classes)]


def repeated_layers(module: Module, is_excluded: Callable[[Module], bool] = lambda _: False) -> list[Module]:
    """Return the outermost layers that have siblings of their class, such as the blocks of a transformer.

    They are layers with children; a module without such siblings has its larger layers, such as a plain sequence.

    Args:
        module: The module.
        is_excluded: Whether a layer with all that it contains is skipped.
    """
    # Each once: a layer may have several names, such as those of a model that its loss contains too.
    blocks = dict.fromkeys(
        _siblings(module, lambda layer: any(True for _ in uncompiled(layer).children()), is_excluded)
    )
    least = _SMALL * num_parameters(module)
    return list(blocks or dict.fromkeys(_siblings(module, lambda layer: num_parameters(layer) >= least, is_excluded)))


def _siblings(
    module: Module, is_candidate: Callable[[Module], bool], is_excluded: Callable[[Module], bool]
) -> Iterator[Module]:
    """Yield layers that have siblings of their class, outermost ones only."""
    if is_excluded(module):
        return
    children = list(module.children())
    layers = [child for child in children if has_forward(child) and num_parameters(child) and not is_excluded(child)]
    candidates = [layer for layer in layers if is_candidate(layer)]
    count = Counter(type(uncompiled(layer)) for layer in candidates)
    repeated = [layer for layer in candidates if count[type(uncompiled(layer))] > 1]
    yield from repeated
    for child in children:
        if not any(child is sibling for sibling in repeated):
            yield from _siblings(child, is_candidate, is_excluded)


@contextmanager
def restored_modes(module: Module) -> Iterator[None]:
    """Restore the mode of each layer, training or evaluation, at the end of a ``with`` block.

    A layer with a ``train`` of its own is called: it may do more there than to set its mode, such as adapters that
    ``eval()`` has merged into their weight.
    """
    modes = [(layer, layer.training) for layer in module.modules()]
    try:
        yield
        for layer, is_training in modes:  # outer ones first, which call inner ones
            if layer.training != is_training and type(layer).train is not nn.Module.train:
                layer.train(is_training)
    finally:
        # Not by train(): frozen layers may be in evaluation mode during training too.
        for layer, is_training in modes:
            layer.training = is_training


def has_forward(module: Module) -> bool:
    """Return whether a module can be called, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward or is_compiled(module)


def is_compiled(module: Module) -> bool:
    """Return whether a module is what ``torch.compile(layer)`` returns, which contains the layer."""
    return "_orig_mod" in module._modules  # noqa: SLF001 - a wrapper of the user's may pass on attributes of its layer


def uncompiled(module: Module) -> Module:
    """Return the layer in a module that ``torch.compile`` returned, and any other module as it is."""
    layer = module._modules.get("_orig_mod")  # noqa: SLF001 - likewise
    return module if layer is None else layer


def num_parameters(module: Module) -> int:
    """Return the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
