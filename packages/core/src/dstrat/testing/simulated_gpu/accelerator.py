"""Accelerator for simulated GPUs."""

from __future__ import annotations

from dstrat.builtin.accelerators.torch_accelerator import TorchAccelerator
from dstrat.testing.simulated_gpu import BACKEND, DEVICE_TYPE, load

load()  # here, so that a process which unpickles the accelerator has the type of its devices next


class SimulatedGPUAccelerator(TorchAccelerator):
    """Simulated GPUs, as many as ``DSTRAT_SIMULATED_GPUS`` says."""

    process_group_backend = BACKEND

    def __init__(self) -> None:
        super().__init__(DEVICE_TYPE)
