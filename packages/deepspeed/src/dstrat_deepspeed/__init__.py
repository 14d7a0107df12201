"""DeepSpeed's ZeRO for dstrat; importing it brings in neither torch nor DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_deepspeed.strategy import DeepSpeedStrategy

__all__ = ["DeepSpeedStrategy"]

_HOMES = {"DeepSpeedStrategy": "dstrat_deepspeed.strategy"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
