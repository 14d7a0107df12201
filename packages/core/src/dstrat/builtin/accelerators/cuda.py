"""Accelerator for GPUs of torch's device type cuda."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.interfaces.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices


class CUDAAccelerator(Accelerator):
    """NVIDIA's GPUs, and AMD's with a ROCm build of torch.

    GPUs are counted through the driver's management library where torch can, because a process that has initialized
    CUDA cannot fork.  ``CUDA_VISIBLE_DEVICES`` is respected: indices count what is visible.
    """

    process_group_backend = "nccl"

    def is_available(self) -> bool:
        return self.auto_device_count() > 0  # torch.cuda.is_available() would initialize the driver

    def auto_device_count(self) -> int:
        return torch.cuda.device_count()

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        return parse_devices(devices, everything=count, limit=count, name="cuda")

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in indices]

    def setup(self, device: torch.device | None = None) -> None:
        torch.cuda.set_device(device if device is not None else 0)  # NCCL uses the current device

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return bytes of memory: allocated, largest allocated so far, and reserved by torch."""
        return {
            "memory_allocated": float(torch.cuda.memory_allocated(device)),
            "max_memory_allocated": float(torch.cuda.max_memory_allocated(device)),
            "memory_reserved": float(torch.cuda.memory_reserved(device)),
        }

    def memory_summary(self, device: torch.device) -> str:
        return torch.cuda.memory_summary(device, abbreviated=True)

    def get_random_state(self, device: torch.device) -> Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def teardown(self) -> None:
        torch.cuda.empty_cache()  # which does nothing in a process that has not initialized CUDA
