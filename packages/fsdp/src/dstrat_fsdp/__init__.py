"""Sharded training for dstrat; importing it brings in no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat_fsdp.model_parallel import ModelParallelStrategy
    from dstrat_fsdp.strategy import DDPFullyShardedNativeStrategy, FSDPStrategy

__all__ = ["DDPFullyShardedNativeStrategy", "FSDPStrategy", "ModelParallelStrategy"]

_MODULES = {
    "DDPFullyShardedNativeStrategy": "strategy",
    "FSDPStrategy": "strategy",
    "ModelParallelStrategy": "model_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
