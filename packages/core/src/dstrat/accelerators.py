"""Accelerators: base classes, the core's classes, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import Accelerator as Accelerator
    from dstrat import AcceleratorRegistry as AcceleratorRegistry
    from dstrat import Devices as Devices
    from dstrat import parse_devices as parse_devices
    from dstrat.builtin.accelerators.cpu import CPUAccelerator as CPUAccelerator
    from dstrat.builtin.accelerators.cuda import CUDAAccelerator as CUDAAccelerator
    from dstrat.builtin.accelerators.mps import MPSAccelerator as MPSAccelerator
    from dstrat.builtin.accelerators.torch_accelerator import TorchAccelerator as TorchAccelerator
    from dstrat.plugins.known import *  # noqa: F403 - the classes of families that it lists

    def __getattr__(name: str) -> Any: ...  # a class of an installed plugin


_HOMES = {
    "Accelerator": "dstrat",
    "AcceleratorRegistry": "dstrat",
    "CPUAccelerator": "dstrat.builtin.accelerators.cpu",
    "CUDAAccelerator": "dstrat.builtin.accelerators.cuda",
    "Devices": "dstrat",
    "MPSAccelerator": "dstrat.builtin.accelerators.mps",
    "TorchAccelerator": "dstrat.builtin.accelerators.torch_accelerator",
    "parse_devices": "dstrat",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, ("accelerator",))
