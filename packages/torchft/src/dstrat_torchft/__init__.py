"""Fault tolerance in each step with torchft for dstrat; importing it brings in neither torch nor torchft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_torchft.diloco import TorchFTDiLoCoStrategy
    from dstrat_torchft.strategy import TorchFTStrategy

__all__ = ["TorchFTDiLoCoStrategy", "TorchFTStrategy"]

_HOMES = {
    "TorchFTDiLoCoStrategy": "dstrat_torchft.diloco",
    "TorchFTStrategy": "dstrat_torchft.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
