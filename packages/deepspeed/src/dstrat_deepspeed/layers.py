"""Layers whose training would not give what one device gives, and those that come too late."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.nn import Module

_logger = logging.getLogger(__name__)


def check_layers(module: Module, *, stage: int, world_size: int) -> None:
    """Refuse embeddings with sparse gradients, and those that change their own weights for the rank's own batch alone.

    Raises:
        MisuseError: There is an embedding with ``sparse=True`` and a stage that shards the optimizer, or with
            ``max_norm`` and several ranks or stage 3.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        if layer.sparse and layer.weight.requires_grad and stage > 0:
            raise MisuseError(
                f"the embedding {name!r} has sparse=True, and stage {stage} of ZeRO has no sparse gradients: leave "
                "sparse=True out, or choose stage 0"
            )
        if layer.max_norm is not None and (stage == 3 or world_size > 1):
            raise MisuseError(
                f"{name} is an {type(layer).__name__} with max_norm={layer.max_norm!r}, which scales its weight in "
                "each forward: ranks would do so for their own batches only, and stage 3 of ZeRO drops it; leave "
                "max_norm out, and scale what the layer returns"
            )


def lay_out(module: Module) -> None:
    """Give parameters that are stored in another order, such as transposed ones, memory in the order of rows.

    DeepSpeed flattens them as they are stored, and sends them so.
    """
    changed = []
    for name, parameter in module.named_parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
            changed.append(name)
    if changed:
        _logger.info(
            "%s, which had strides of their own, are stored row by row, as DeepSpeed wants", ", ".join(changed)
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
