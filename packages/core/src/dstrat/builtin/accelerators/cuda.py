"""Accelerator for GPUs of torch's device type cuda."""

from __future__ import annotations

import torch

from dstrat.builtin.accelerators.torch_accelerator import TorchAccelerator


class CUDAAccelerator(TorchAccelerator):
    """NVIDIA's GPUs, and AMD's with a ROCm build of torch.

    GPUs are counted through the driver's management library where torch can, because a process that has initialized
    CUDA cannot fork.  ``CUDA_VISIBLE_DEVICES`` is respected: indices count what is visible.
    """

    process_group_backend = "nccl"

    def __init__(self) -> None:
        super().__init__("cuda")

    def memory_summary(self, device: torch.device) -> str:
        return torch.cuda.memory_summary(device, abbreviated=True)
