"""Sharded training for dstrat; importing it brings in no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat_fsdp.fairscale.fully_sharded import DDPFullyShardedStrategy
    from dstrat_fsdp.fairscale.sharded import DDPShardedStrategy, DDPSpawnShardedStrategy
    from dstrat_fsdp.model_parallel import ModelParallelStrategy
    from dstrat_fsdp.strategy import DDPFullyShardedNativeStrategy, FSDPStrategy

__all__ = [
    "DDPFullyShardedNativeStrategy",
    "DDPFullyShardedStrategy",
    "DDPShardedStrategy",
    "DDPSpawnShardedStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
]

_MODULES = {
    "DDPFullyShardedNativeStrategy": "strategy",
    "DDPFullyShardedStrategy": "fairscale.fully_sharded",
    "DDPShardedStrategy": "fairscale.sharded",
    "DDPSpawnShardedStrategy": "fairscale.sharded",
    "FSDPStrategy": "strategy",
    "ModelParallelStrategy": "model_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
