"""DistributedDataParallel and DataParallel strategies for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_ddp.data_parallel import DataParallelStrategy
    from dstrat_ddp.ddp2 import DDP2Strategy
    from dstrat_ddp.strategy import DDPSpawnStrategy, DDPStrategy

__all__ = ["DDP2Strategy", "DDPSpawnStrategy", "DDPStrategy", "DataParallelStrategy"]

_HOMES = {
    "DDP2Strategy": "dstrat_ddp.ddp2",
    "DDPSpawnStrategy": "dstrat_ddp.strategy",
    "DDPStrategy": "dstrat_ddp.strategy",
    "DataParallelStrategy": "dstrat_ddp.data_parallel",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
