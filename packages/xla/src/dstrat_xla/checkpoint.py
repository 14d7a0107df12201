"""Checkpoints in one file, with tensors copied from the device in one transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat_xla import runtime

if TYPE_CHECKING:
    from pathlib import Path


class XLACheckpointIO(TorchCheckpointIO):
    """One file for each checkpoint, with tensors on the CPU, so that it loads without torch_xla."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        super().save_checkpoint(runtime.state_on_host(checkpoint), path)
