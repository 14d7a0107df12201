"""Layers that repeat in a module, and reduced modules, which keep the first of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.nn import Module


def keep_repeated_layers(module: Module, count: int, prefix: str = "") -> dict[str, tuple[int, int]]:
    """Remove repeated layers of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` but for the first ones.

    Layers repeat if they follow one another with the same classes and shapes of tensors, also as a pattern of several:
    an output has the same shape after fewer of them.  Lists inside of a layer that repeats stay, such as its experts.

    Args:
        module: The module, which is changed.
        count: How often a layer or a pattern stays.
        prefix: Name of the module, before those of its layers.

    Returns:
        The numbers of layers before and after of each list that was cut, by its name.
    """
    reduced: dict[str, tuple[int, int]] = {}
    inside: set[Module] = set()
    children = list(module._modules.items())  # noqa: SLF001 - named_children omits a layer that is there twice
    if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        removed: list[str] = []
        for start, period, repetitions in _repetitions([child for _, child in children]):
            first, last = start + count * period, start + repetitions * period
            inside |= {child for _, child in children[start:last] if child is not None}
            removed += [name for name, _ in children[first:last]]
        if removed:
            reduced[prefix] = len(children), len(children) - len(removed)
            _remove(module, removed)
    for name, child in children:
        if child is not None and child not in inside:
            reduced |= keep_repeated_layers(child, count, f"{prefix}.{name}" if prefix else name)
    return reduced


def _repetitions(layers: Sequence[Module | None]) -> Iterator[tuple[int, int, int]]:
    """Yield where layers with parameters repeat: the first of them, how many form the pattern, and how often."""
    numbers: dict[object, int] = {}
    kinds = [numbers.setdefault(_kind(layer), len(numbers)) for layer in layers]
    start = 0
    while start < len(kinds):
        for period in range(1, (len(kinds) - start) // 2 + 1):
            pattern, repetitions = kinds[start : start + period], 1
            while kinds[start + repetitions * period :][:period] == pattern:
                repetitions += 1
            has_parameters = any(layer and any(True for _ in layer.parameters()) for layer in layers[start:][:period])
            if repetitions > 1 and has_parameters:
                yield start, period, repetitions
                start += period * repetitions
                break
        else:
            start += 1


def _kind(layer: Module | None) -> object:
    """Return what is the same for layers that are equal but for their values."""
    if layer is None:
        return None
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return tuple(type(inner) for inner in layer.modules()), shapes


def _remove(module: Module, names: Sequence[str]) -> None:
    for name in names:
        delattr(module, name)
    children = module._modules  # noqa: SLF001 - as above
    if not isinstance(module, nn.ModuleDict) and all(name.isdecimal() for name in children):
        numbers = map(str, range(len(children)))
        module._modules = dict(zip(numbers, children.values(), strict=True))  # noqa: SLF001 - as above
