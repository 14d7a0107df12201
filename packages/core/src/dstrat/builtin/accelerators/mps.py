"""Accelerator for the GPU of Apple silicon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from dstrat.builtin.accelerators.torch_accelerator import TorchAccelerator

if TYPE_CHECKING:
    from torch import Tensor


class MPSAccelerator(TorchAccelerator):
    """The one GPU of Apple silicon; it has no float64."""

    process_group_backend = "none"  # no backend of torch supports its tensors, and there is one device only
    has_streams = False  # and a copy that does not block may be read before it is complete

    def __init__(self) -> None:
        super().__init__("mps")

    def auto_device_count(self) -> int:
        return int(torch.backends.mps.is_available())

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float64 and dtype.itemsize > 1  # nor 8-bit floats

    def setup(self, device: torch.device | None = None) -> None:
        """Do nothing: there is one device, which is always the current one."""

    @override
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return bytes of memory: in use, and held by the driver."""
        return {
            "memory_allocated": float(torch.mps.current_allocated_memory()),
            "driver_memory_allocated": float(torch.mps.driver_allocated_memory()),
        }

    @override
    def get_random_state(self, device: torch.device) -> Tensor | None:
        return torch.mps.get_rng_state()

    @override
    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        torch.mps.set_rng_state(state)

    def teardown(self) -> None:
        torch.mps.empty_cache()
