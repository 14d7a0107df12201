"""FairScale's sharded strategies for dstrat; importing it brings in neither torch nor FairScale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_fairscale.fully_sharded import DDPFullyShardedStrategy
    from dstrat_fairscale.sharded import DDPShardedStrategy, DDPSpawnShardedStrategy

__all__ = ["DDPFullyShardedStrategy", "DDPShardedStrategy", "DDPSpawnShardedStrategy"]

_HOMES = {
    "DDPFullyShardedStrategy": "dstrat_fairscale.fully_sharded",
    "DDPShardedStrategy": "dstrat_fairscale.sharded",
    "DDPSpawnShardedStrategy": "dstrat_fairscale.sharded",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
