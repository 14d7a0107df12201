"""Intel Gaudi accelerators for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_hpu.accelerator import HPUAccelerator
    from dstrat_hpu.checkpoint import HPUCheckpointIO
    from dstrat_hpu.fsdp import HPUFSDPStrategy
    from dstrat_hpu.parallel import HPUParallelStrategy
    from dstrat_hpu.precision import HPUPrecisionPlugin
    from dstrat_hpu.strategy import SingleHPUStrategy

    HPUDDPStrategy = HPUParallelStrategy

__all__ = [
    "HPUAccelerator",
    "HPUCheckpointIO",
    "HPUDDPStrategy",
    "HPUFSDPStrategy",
    "HPUParallelStrategy",
    "HPUPrecisionPlugin",
    "SingleHPUStrategy",
]

_HOMES = {
    "HPUAccelerator": "dstrat_hpu.accelerator",
    "HPUCheckpointIO": "dstrat_hpu.checkpoint",
    "HPUDDPStrategy": "dstrat_hpu.parallel",
    "HPUFSDPStrategy": "dstrat_hpu.fsdp",
    "HPUParallelStrategy": "dstrat_hpu.parallel",
    "HPUPrecisionPlugin": "dstrat_hpu.precision",
    "SingleHPUStrategy": "dstrat_hpu.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
