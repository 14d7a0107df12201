"""Strategies: base classes, the core's classes, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import CheckpointIO as CheckpointIO
    from dstrat import GradientSyncStrategy as GradientSyncStrategy
    from dstrat import ParallelStrategy as ParallelStrategy
    from dstrat import SingleDeviceStrategy as SingleDeviceStrategy
    from dstrat import Strategy as Strategy
    from dstrat import StrategyRegistry as StrategyRegistry
    from dstrat.plugins.known import *  # noqa: F403 - the classes of families that it lists

    def __getattr__(name: str) -> Any: ...  # a class of an installed plugin


_HOMES = {
    "CheckpointIO": "dstrat",
    "GradientSyncStrategy": "dstrat",
    "ParallelStrategy": "dstrat",
    "SingleDeviceStrategy": "dstrat",
    "Strategy": "dstrat",
    "StrategyRegistry": "dstrat",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, ("strategy",))
