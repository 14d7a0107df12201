"""The conformance kit: standard tests that an author's own test class inherits, and that prove a component.

A package's tests need no more than this::

    from dstrat.testing import StrategySuite


    class TestMyStrategy(StrategySuite):
        alias = "my_strategy"

``dstrat test my_strategy`` runs the same and prints a table.  It needs ``pip install "dstrat[testing]"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.testing.accelerator import AcceleratorSuite as AcceleratorSuite
    from dstrat.testing.checkpoint_io import CheckpointIOSuite as CheckpointIOSuite
    from dstrat.testing.cluster import ClusterEnvironmentSuite as ClusterEnvironmentSuite
    from dstrat.testing.launcher import LauncherSuite as LauncherSuite
    from dstrat.testing.plugin import PluginSuite as PluginSuite
    from dstrat.testing.precision import PrecisionSuite as PrecisionSuite
    from dstrat.testing.strategy.layouts import Layout as Layout
    from dstrat.testing.strategy.layouts import LayoutSuite as LayoutSuite
    from dstrat.testing.strategy.suite import StrategySuite as StrategySuite

_HOMES = {
    "AcceleratorSuite": "dstrat.testing.accelerator",
    "CheckpointIOSuite": "dstrat.testing.checkpoint_io",
    "ClusterEnvironmentSuite": "dstrat.testing.cluster",
    "LauncherSuite": "dstrat.testing.launcher",
    "Layout": "dstrat.testing.strategy.layouts",
    "LayoutSuite": "dstrat.testing.strategy.layouts",
    "PluginSuite": "dstrat.testing.plugin",
    "PrecisionSuite": "dstrat.testing.precision",
    "StrategySuite": "dstrat.testing.strategy.suite",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
