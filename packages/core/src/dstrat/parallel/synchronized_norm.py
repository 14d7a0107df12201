"""Batch-norm layers that share their statistics over all processes for the time of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from torch.nn import Module


class SynchronizedNorm:
    """Puts torch's SyncBatchNorm into the place of a module's batch-norm layers; :meth:`undo` puts these back.

    Args:
        module: Changed in place.
    """

    def __init__(self, module: Module) -> None:
        self._places = [
            (parent, name, layer)
            for parent in module.modules()
            for name, layer in parent.named_children()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
        ]
        for parent, name, layer in self._places:
            parent.add_module(name, nn.SyncBatchNorm.convert_sync_batchnorm(layer))

    def undo(self) -> None:
        """Put the layers back, with the weights, statistics and mode that the training has left."""
        for parent, name, layer in self._places:
            synchronized = parent.get_submodule(name)
            layer._parameters, layer._buffers = synchronized._parameters, synchronized._buffers  # noqa: SLF001 - all of both
            layer.training = synchronized.training
            parent.add_module(name, layer)
        self._places = []
