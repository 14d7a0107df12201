"""DistributedDataParallel and DataParallel strategies for dstrat; importing it brings in no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat_ddp.data_parallel import DataParallelStrategy
    from dstrat_ddp.ddp2 import DDP2Strategy
    from dstrat_ddp.spawn import DDPSpawnStrategy
    from dstrat_ddp.strategy import DDPStrategy

__all__ = ["DDP2Strategy", "DDPSpawnStrategy", "DDPStrategy", "DataParallelStrategy"]

_MODULES = {
    "DDP2Strategy": "ddp2",
    "DDPSpawnStrategy": "spawn",
    "DDPStrategy": "strategy",
    "DataParallelStrategy": "data_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
