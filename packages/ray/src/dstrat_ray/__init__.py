"""Ranks as actors of Ray, workers of Ray Train, and reports to Ray Train and Tune; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_ray.callback import RayReportCallback, latest_checkpoint
    from dstrat_ray.cluster import RayTrainEnvironment
    from dstrat_ray.launcher import RayLauncher

__all__ = ["RayLauncher", "RayReportCallback", "RayTrainEnvironment", "latest_checkpoint"]

_HOMES = {
    "RayLauncher": "dstrat_ray.launcher",
    "RayReportCallback": "dstrat_ray.callback",
    "RayTrainEnvironment": "dstrat_ray.cluster",
    "latest_checkpoint": "dstrat_ray.callback",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
