"""Layouts of several kinds of parallelism for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_mesh.strategy import MeshStrategy

__all__ = ["MeshStrategy"]

_HOMES = {"MeshStrategy": "dstrat_mesh.strategy"}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
