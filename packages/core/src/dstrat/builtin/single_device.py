"""Strategy for one device and one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.interfaces.communication import CommunicationLayout
from dstrat.interfaces.strategy import Strategy
from dstrat.interfaces.tied_parameters import keep_ties
from dstrat.parallel.activation_memory import ActivationMemory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.nn import Module

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.memory import TrainingSize
    from dstrat.interfaces.precision import Precision
    from dstrat.parallel.layers import LayerClasses, LayerPolicy


T = TypeVar("T")


class SingleDeviceStrategy(Strategy):
    """Training on one device, without any communication.

    Args:
        device: The device; None takes the first that the accelerator offers.
        accelerator: The hardware.
        checkpoint_io: How checkpoints reach storage.
        precision_plugin: The precision: dtypes, casts, loss scaling.
        activation_checkpointing: What is not saved for the backward pass, and computed again: ``"full"`` or
            ``"selective"`` for repeated layers, or classes of layers.
        activation_checkpointing_policy: The layers, as classes or a function of a module.
        activation_offload: Whether repeated layers save their activations on the host; True, or the layers.

    Raises:
        RequestError: An option has an impossible value.
        ConflictError: Two options exclude each other.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        activation_checkpointing: LayerClasses | str | None = None,
        activation_checkpointing_policy: LayerPolicy | None = None,
        activation_offload: bool | LayerPolicy = False,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.saved_activations = ActivationMemory.of(
            activation_checkpointing, activation_checkpointing_policy, activation_offload
        )
        if device is not None:
            self.add_components(parallel_devices=(torch.device(device),))

    @classmethod
    def layout_options(cls, module: Module, world_size: int, ranks_per_machine: int) -> Sequence[Mapping[str, Any]]:  # noqa: ARG003 - the same for all
        return ({}, {"activation_checkpointing": "full"})

    def communication_layout(self, training: TrainingSize) -> CommunicationLayout | None:
        # A subclass that drives several devices has its own communication between them.
        return CommunicationLayout() if training.world_size == 1 else None

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
