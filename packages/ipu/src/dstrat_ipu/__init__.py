"""Graphcore's IPUs for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_ipu.accelerator import IPUAccelerator
    from dstrat_ipu.precision import IPUPrecision
    from dstrat_ipu.strategy import IPUStrategy

__all__ = ["IPUAccelerator", "IPUPrecision", "IPUStrategy"]

_HOMES = {
    "IPUAccelerator": "dstrat_ipu.accelerator",
    "IPUPrecision": "dstrat_ipu.precision",
    "IPUStrategy": "dstrat_ipu.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
