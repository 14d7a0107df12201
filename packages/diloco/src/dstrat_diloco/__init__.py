"""DiLoCo: groups of ranks that train apart, for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_diloco.strategy import DiLoCoStrategy

__all__ = ["DiLoCoStrategy"]

_HOMES = {"DiLoCoStrategy": "dstrat_diloco.strategy"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
