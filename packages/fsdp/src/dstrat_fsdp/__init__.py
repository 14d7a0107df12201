"""Sharded training for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_fsdp.model_parallel import ModelParallelStrategy
    from dstrat_fsdp.strategy import DDPFullyShardedNativeStrategy, FSDPStrategy

__all__ = ["DDPFullyShardedNativeStrategy", "FSDPStrategy", "ModelParallelStrategy"]

_HOMES = {
    "DDPFullyShardedNativeStrategy": "dstrat_fsdp.strategy",
    "FSDPStrategy": "dstrat_fsdp.strategy",
    "ModelParallelStrategy": "dstrat_fsdp.model_parallel",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
