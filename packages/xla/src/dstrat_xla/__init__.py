"""TPUs and other XLA devices for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_xla.accelerator import TPUAccelerator, XLAAccelerator
    from dstrat_xla.checkpoint import XLACheckpointIO
    from dstrat_xla.cluster import XLAEnvironment
    from dstrat_xla.fsdp import XLAFSDPStrategy
    from dstrat_xla.precision import XLAPrecision
    from dstrat_xla.spmd import XLASPMDStrategy
    from dstrat_xla.strategy import SingleDeviceXLAStrategy, XLAStrategy

    SingleTPUStrategy = SingleDeviceXLAStrategy
    TPUSpawnStrategy = XLAStrategy

__all__ = [
    "SingleDeviceXLAStrategy",
    "SingleTPUStrategy",
    "TPUAccelerator",
    "TPUSpawnStrategy",
    "XLAAccelerator",
    "XLACheckpointIO",
    "XLAEnvironment",
    "XLAFSDPStrategy",
    "XLAPrecision",
    "XLASPMDStrategy",
    "XLAStrategy",
]

_HOMES = {
    "SingleDeviceXLAStrategy": "dstrat_xla.strategy",
    "SingleTPUStrategy": "dstrat_xla.strategy",
    "TPUAccelerator": "dstrat_xla.accelerator",
    "TPUSpawnStrategy": "dstrat_xla.strategy",
    "XLAAccelerator": "dstrat_xla.accelerator",
    "XLACheckpointIO": "dstrat_xla.checkpoint",
    "XLAEnvironment": "dstrat_xla.cluster",
    "XLAFSDPStrategy": "dstrat_xla.fsdp",
    "XLAPrecision": "dstrat_xla.precision",
    "XLASPMDStrategy": "dstrat_xla.spmd",
    "XLAStrategy": "dstrat_xla.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
