"""Horovod as a strategy for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_horovod.cluster import HorovodEnvironment
    from dstrat_horovod.strategy import HorovodStrategy

__all__ = ["HorovodEnvironment", "HorovodStrategy"]

_HOMES = {
    "HorovodEnvironment": "dstrat_horovod.cluster",
    "HorovodStrategy": "dstrat_horovod.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
