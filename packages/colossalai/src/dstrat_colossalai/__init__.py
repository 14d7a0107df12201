"""Strategies of Colossal-AI's booster for dstrat; importing it brings in neither torch nor Colossal-AI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_colossalai.strategy import (
        ColossalAILowLevelZeroStrategy,
        ColossalAIStrategy,
        ColossalAITorchDDPStrategy,
        ColossalAITorchFSDPStrategy,
    )

__all__ = [
    "ColossalAILowLevelZeroStrategy",
    "ColossalAIStrategy",
    "ColossalAITorchDDPStrategy",
    "ColossalAITorchFSDPStrategy",
]

_HOMES = dict.fromkeys(__all__, "dstrat_colossalai.strategy")

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
