"""Strategy with one process on one Gaudi."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.builtin.single_device import SingleDeviceStrategy

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.precision import Precision


class SingleHPUStrategy(SingleDeviceStrategy):
    """Training on one Gaudi, without any communication.

    Args:
        device: The device, such as ``"hpu:2"`` or its index; None takes the first of those that were asked for.
        accelerator: The hardware.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The dtypes and what follows from them.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        device = torch.device("hpu", device) if isinstance(device, int) else device
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)
