"""Computing the activations of layers again in the backward pass, rather than keeping them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch.utils.checkpoint import checkpoint

from dstrat.errors import ConflictError, RequestError
from dstrat_fsdp.wrap_policy import checked_policy, parts_of_classes

if TYPE_CHECKING:
    from torch.nn import Module

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
