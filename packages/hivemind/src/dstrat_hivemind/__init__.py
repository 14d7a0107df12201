"""Collaborative training with hivemind for dstrat; importing it brings in neither torch nor hivemind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_hivemind.monitor import CollaborationMonitor
    from dstrat_hivemind.strategy import HivemindStrategy

__all__ = ["CollaborationMonitor", "HivemindStrategy"]

_HOMES = {
    "CollaborationMonitor": "dstrat_hivemind.monitor",
    "HivemindStrategy": "dstrat_hivemind.strategy",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
