"""Accelerator for the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.interfaces.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.accelerator import Devices

MOST_PROCESSES = 1024
"""Largest number of processes on one machine; more are probably a typing error."""


class CPUAccelerator(Accelerator):
    """The processor, where each device is one process, and ``"auto"`` and ``-1`` are a single one."""

    process_group_backend = "gloo"

    def is_available(self) -> bool:
        return True

    def auto_device_count(self) -> int:
        return 1

    def parse_devices(self, devices: Devices) -> list[int]:
        return parse_devices(devices, everything=1, limit=MOST_PROCESSES, name="cpu")

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize > 1  # 8-bit floats are converted for each product, slower than others

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device("cpu") for _ in indices]
