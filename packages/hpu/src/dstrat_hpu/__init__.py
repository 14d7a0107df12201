"""Intel Gaudi accelerators for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.strategies import DDPStrategy as HPUParallelStrategy
    from dstrat.strategies import FSDPStrategy as HPUFSDPStrategy
    from dstrat.strategies import SingleDeviceStrategy as SingleHPUStrategy
    from dstrat_hpu.accelerator import HPUAccelerator
    from dstrat_hpu.checkpoint import HPUCheckpointIO
    from dstrat_hpu.graphs import HPUGraphs
    from dstrat_hpu.monitoring import HPUProfiler, HPUStatsMonitor
    from dstrat_hpu.precision import HPUPrecisionPlugin

    HPUDDPStrategy = HPUParallelStrategy

__all__ = [
    "HPUAccelerator",
    "HPUCheckpointIO",
    "HPUDDPStrategy",
    "HPUFSDPStrategy",
    "HPUGraphs",
    "HPUParallelStrategy",
    "HPUPrecisionPlugin",
    "HPUProfiler",
    "HPUStatsMonitor",
    "SingleHPUStrategy",
]

# lightning-habana's names for strategies that need nothing else on Gaudi.  dstrat.strategies finds those of other
# families where they are installed, and says what to install where they are not.
_HOMES = {
    "HPUAccelerator": "dstrat_hpu.accelerator",
    "HPUCheckpointIO": "dstrat_hpu.checkpoint",
    "HPUDDPStrategy": "dstrat.strategies:DDPStrategy",
    "HPUFSDPStrategy": "dstrat.strategies:FSDPStrategy",
    "HPUGraphs": "dstrat_hpu.graphs",
    "HPUParallelStrategy": "dstrat.strategies:DDPStrategy",
    "HPUPrecisionPlugin": "dstrat_hpu.precision",
    "HPUProfiler": "dstrat_hpu.monitoring",
    "HPUStatsMonitor": "dstrat_hpu.monitoring",
    "SingleHPUStrategy": "dstrat.strategies:SingleDeviceStrategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
