"""Checkpoint plugins: base classes, the core's classes, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.checkpoint.async_io import AsyncCheckpointIO as AsyncCheckpointIO
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO as PortableCheckpointIO
    from dstrat.checkpoint.torch_file import TorchCheckpointIO as TorchCheckpointIO
    from dstrat.interfaces.checkpoint_io import CheckpointIO as CheckpointIO

    def __getattr__(name: str) -> Any: ...  # a class of an installed plugin


_HOMES = {
    "AsyncCheckpointIO": "dstrat.checkpoint.async_io",
    "CheckpointIO": "dstrat.interfaces.checkpoint_io",
    "PortableCheckpointIO": "dstrat.checkpoint.portable.checkpoint_io",
    "TorchCheckpointIO": "dstrat.checkpoint.torch_file",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, ("checkpoint_io",))
