"""Layers whose training would not give what one device gives, and those that come too late."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextmanager
def naming_new_parameters(module: Module) -> Iterator[None]:
    """Say which parameters stage 3 does not know, where it misses the attributes that it gives to others."""
    try:
        yield
    except AttributeError as error:
        if "'Parameter' object has no attribute 'ds_" not in str(error):
            raise
        names = [name for name, parameter in module.named_parameters() if not hasattr(parameter, "ds_id")]
        raise MisuseError(
            f"{', '.join(names) or 'a parameter'} came to the module after the training had begun, and stage 3 of ZeRO "
            "has not sharded it: make layers before fit, or in configure_model"
        ) from error
