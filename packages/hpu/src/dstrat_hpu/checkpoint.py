"""Checkpoints in one file each, with tensors of the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.interfaces.batch import apply_to_tensors

if TYPE_CHECKING:
    from pathlib import Path


class HPUCheckpointIO(TorchCheckpointIO):
    """One file for each checkpoint, with tensors on the CPU, so that it loads where there is no Gaudi."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        # torch names the device in the file, and can read such a tensor only where that device is.
        super().save_checkpoint(apply_to_tensors(checkpoint, torch.Tensor.cpu), path)
