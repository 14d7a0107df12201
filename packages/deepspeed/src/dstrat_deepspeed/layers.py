"""Layers whose training would not give what one device gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from torch.nn import Module


def check_layers(module: Module, *, stage: int, world_size: int) -> None:
    """Refuse layers that change their own weights in a forward pass, for the rank's own batch alone.

    Raises:
        MisuseError: There is an embedding with ``max_norm``, and several ranks or stage 3.
    """
    if stage < 3 and world_size == 1:
        return
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise MisuseError(
                f"{name} is an {type(layer).__name__} with max_norm={layer.max_norm!r}, which scales its weight in "
                "each forward: ranks would do so for their own batches only, and stage 3 of ZeRO drops it; leave "
                "max_norm out, and scale what the layer returns"
            )
