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


def checked_policy(option: str, given: Any, *, or_size: bool) -> Any:
    """Return a policy of layers as it was given, classes as a tuple of them.

    Args:
        option: Whose value it is.
        given: A class of layers, or several; a function of a module; None.
        or_size: Whether it may be a number of parameters too.

    Raises:
        RequestError: It is none of these.
    """
    if given is None or (or_size and isinstance(given, int) and not isinstance(given, bool) and given > 0):
        return given
    classes = (given,) if isinstance(given, type) else given
    if isinstance(classes, Iterable) and not isinstance(classes, str | nn.Module):
        classes = tuple(classes)
        if classes and all(isinstance(one, type) and issubclass(one, nn.Module) for one in classes):
            return classes
    elif callable(given) and not isinstance(given, nn.Module):
        return given
    size = ", or the least number of parameters of a block" if or_size else ""
    raise RequestError(
        f"{option} {given!r} is not a class of layers such as torch.nn.TransformerEncoderLayer, several of them, a "
        f"function that says of a module whether it is meant{size}"
    )


def blocks_of(module: Module, policy: WrapPolicy | None) -> list[Module]:
    """Return the blocks of a module that is not sharded yet, inner ones before those that contain them.

    Args:
        module: Parts of it that have sharded themselves are left alone.
        policy: Classes of layers; a function of a module (or torch's ``auto_wrap_policy`` functions, of a module,
            ``recurse`` and ``nonwrapped_numel``); the least number of parameters of a block; None looks for layers
            that are repeated.

    Raises:
        RequestError: The policy matches nothing, or a block shares a parameter with the rest of the module.
    """
    if policy is None:
        return [block for block in _repeated(module) if not _shared_parameters(block, module)]
    blocks = [part for part in _chosen(module, policy) if part is not module]
    if not blocks and not any(isinstance(part, FSDPModule) for part in module.modules()):
        classes = ", ".join(sorted({type(part).__name__ for part in _parts(module) if part is not module}))
        raise RequestError(
            f"auto_wrap_policy {policy!r} matches no layer of {type(module).__name__}, which has "
            f"{_numel(module)} parameters in layers of the classes {classes or '(none)'}"
        )
    for block in blocks:
        _check_own_parameters(block, module)
    return blocks


def outermost_layers(module: Module) -> list[Module]:
    """Return the layers that a step calls by themselves, which have all parameters among them.

    Raises:
        RequestError: A parameter is in no such layer, or in several.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise RequestError(
            f"{type(module).__name__} optimizes manually, and its own parameter {own[0]!r} is in no layer before whose "
            "forward it could be gathered: move it into one"
        )
    layers = [layer for child in module.children() for layer in _callable_layers(child)]
    for layer in layers:
        _check_own_parameters(layer, module)
    return layers


def _callable_layers(part: Module) -> Iterator[Module]:
    if has_forward(part):
        if _numel(part) and not isinstance(part, FSDPModule):
            yield part
    else:
        for child in part.children():
            yield from _callable_layers(child)


def parts_of_classes(module: Module, classes: Iterable[type]) -> list[Module]:
    """Return the parts of a module that are of one of the classes, inner ones first."""
    wanted = tuple(classes)
    return [part for part in _parts(module) if isinstance(part, wanted)]


def has_forward(part: Module) -> bool:
    """Return whether a module can be called, unlike a ModuleList."""
    return type(part).forward is not nn.Module.forward


def _chosen(module: Module, policy: WrapPolicy) -> list[Module]:
    if isinstance(policy, int):
        return _by_size(module, lambda _, numel: numel >= policy)
    if not callable(policy):
        return parts_of_classes(module, policy)
    ask: Any = policy
    names = inspect.signature(ask).parameters
    if "nonwrapped_numel" in names or "recurse" in names:
        return _by_size(module, lambda part, numel: ask(part, recurse=False, nonwrapped_numel=numel))
    return [part for part in _parts(module) if ask(part)]


def _parts(module: Module) -> Iterator[Module]:
    """Yield the parts that can be sharded and have parameters of their own, inner ones first."""
    sharded = {id(p) for unit in module.modules() if isinstance(unit, FSDPModule) for p in unit.modules()}
    for part in reversed(list(module.modules())):  # an outer module comes first in torch's order
        if has_forward(part) and id(part) not in sharded and _numel(part):
            yield part


def _by_size(module: Module, wants: Callable[[Module, int], bool]) -> list[Module]:
    """Return the parts that are wanted by the number of their parameters that are in no inner block."""
    blocks: list[Module] = []
    for part in _parts(module):
        inner = {id(p) for block in blocks for p in block.parameters()}
        if wants(part, sum(p.numel() for p in part.parameters() if id(p) not in inner)):
            blocks.append(part)
    return blocks


def _repeated(module: Module) -> list[Module]:
    blocks = list(_siblings(module, lambda part: any(True for _ in part.children())))
    least = _SMALL * _numel(module)
    return blocks or list(_siblings(module, lambda part: _numel(part) >= least))


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


def _check_own_parameters(block: Module, module: Module) -> None:
    shared = _shared_parameters(block, module)
    if shared:
        raise RequestError(
            f"a {type(block).__name__} that is to be sharded by itself has a parameter {shared[0]!r} that also belongs "
            "to a layer outside of it: choose one that contains both, or leave it out of auto_wrap_policy"
        )


def _shared_parameters(block: Module, module: Module) -> list[str]:
    """Return the names (in the block) of parameters that a layer outside of the block has too."""
    inside = {id(part) for part in block.modules()}
    outside = {
        id(parameter)
        for part in module.modules()
        if id(part) not in inside
        for parameter in part.parameters(recurse=False)
    }
    return [name for name, parameter in block.named_parameters() if id(parameter) in outside]


def _numel(module: Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers_with_statistics(module: Module) -> list[Module]:
    """Return the layers of a module, not sharded yet, that :func:`keeps_statistics` is true of."""
    layers = [layer for layer in module.modules() if layer is not module and keeps_statistics(layer)]
    return [layer for layer in layers if not isinstance(layer, FSDPModule) and not _shared_parameters(layer, module)]


def keeps_statistics(layer: Module) -> bool:
    """Return whether a layer has parameters beside running statistics, as batch norm has."""
    return getattr(layer, "running_mean", None) is not None and any(True for _ in layer.parameters(recurse=False))


def running_statistics(module: Module) -> list[Tensor]:
    """Return the buffers of the layers that keep running statistics; none that is divided among the processes."""
    layers = [layer for layer in module.modules() if getattr(layer, "running_mean", None) is not None]
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    return [buffer for buffer in buffers if not isinstance(buffer, DTensor)]


# Computing the activations of layers again in the backward pass, rather than keeping them.


LayerClasses = type | Iterable[type]
LayerPolicy = Iterable[type] | Callable[["Module"], bool]


class ActivationCheckpointing:
    """What of a module keeps no activations between the passes.

    The layers' ``forward`` is replaced on the instances, so that no name of a parameter changes.

    Args:
        classes: A class of layers, or several.
        policy: The same as a set of classes, or a function that says of a module whether it is meant.

    Raises:
        ConflictError: Both are given.
        RequestError: They are something else.
    """

    def __init__(self, classes: LayerClasses | None, policy: LayerPolicy | None) -> None:
        if classes is not None and policy is not None:
            raise ConflictError(
                "activation_checkpointing and activation_checkpointing_policy both say which layers are meant: "
                "leave one out"
            )
        name = "activation_checkpointing" if policy is None else "activation_checkpointing_policy"
        self._chosen = checked_policy(name, policy if classes is None else classes, or_size=False)
        self._layers: list[Module] = []

    def apply(self, module: Module) -> None:
        """Let the layers of a module compute their activations again.

        Raises:
            RequestError: The module has no such layers.
        """
        if self._chosen is None:
            return
        self._layers = _matching(module, self._chosen)
        if not self._layers:
            raise RequestError(
                f"activation checkpointing of {self._chosen!r} matches no layer of {type(module).__name__}"
            )
        for layer in self._layers:
            forward = layer.forward
            layer.forward = functools.wraps(forward)(functools.partial(checkpoint, forward, use_reentrant=False))

    def undo(self) -> None:
        """Give the layers their own ``forward`` back."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
        self._layers = []


def _matching(module: Module, chosen: LayerPolicy) -> list[Module]:
    if callable(chosen):
        return [part for part in module.modules() if chosen(part)]
    return parts_of_classes(module, chosen)
