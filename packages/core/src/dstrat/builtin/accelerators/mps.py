"""Accelerator for the GPU of Apple silicon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.interfaces.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices


class MPSAccelerator(Accelerator):
    """The one GPU of Apple silicon; it has no float64."""

    process_group_backend = "none"  # no backend of torch supports its tensors, and there is one device only

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def auto_device_count(self) -> int:
        return int(self.is_available())

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        return parse_devices(devices, everything=count, limit=count, name="mps")

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device("mps", index) for index in indices]

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float64 and dtype.itemsize > 1  # nor 8-bit floats

    def get_device_stats(self, device: torch.device) -> dict[str, float]:  # noqa: ARG002 - there is only one
        """Return bytes of memory: in use, and held by the driver."""
        return {
            "memory_allocated": float(torch.mps.current_allocated_memory()),
            "driver_memory_allocated": float(torch.mps.driver_allocated_memory()),
        }

    def get_random_state(self, device: torch.device) -> Tensor | None:  # noqa: ARG002 - there is only one
        return torch.mps.get_rng_state()

    def set_random_state(self, device: torch.device, state: Tensor) -> None:  # noqa: ARG002 - there is only one
        torch.mps.set_rng_state(state)

    def teardown(self) -> None:
        torch.mps.empty_cache()
