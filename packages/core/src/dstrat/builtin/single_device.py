"""Strategy for one device and one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.interfaces.communication import CommunicationLayout
from dstrat.interfaces.strategy import Strategy
from dstrat.interfaces.tied_parameters import keep_ties

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import Precision


T = TypeVar("T")


class SingleDeviceStrategy(Strategy):
    """Training on one device, without any communication.

    Args:
        device: The device; None takes the first that the accelerator offers.
        accelerator: The hardware.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        if device is not None:
            self.add_components(parallel_devices=(torch.device(device),))

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:  # noqa: ARG002 - there is none
        return CommunicationLayout()

    @property
    def assigned_device(self) -> torch.device:
        return self._present(self.components.parallel_devices, "device")[0]

    @property
    def root_device(self) -> torch.device:
        accelerator, device = self.components.accelerator, self.assigned_device
        return device if accelerator is None else accelerator.device_in_process(device)

    @property
    def is_global_zero(self) -> bool:
        return True

    def model_to_device(self) -> None:
        with keep_ties(self.module):
            self.module.to(self.root_device)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return obj

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def all_gather(
        self,
        tensor: Tensor,
        group: Any | None = None,
        sync_grads: bool = False,
    ) -> Tensor:
        return tensor.unsqueeze(0)
