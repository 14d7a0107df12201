"""The plugin, accelerator, precision and checkpoint io of this distribution pass the conformance kit."""

from __future__ import annotations

from dstrat.testing import AcceleratorSuite, CheckpointIOSuite, PluginSuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-hpu"


class TestAccelerator(AcceleratorSuite):
    alias = "hpu"


class TestCheckpointIO(CheckpointIOSuite):
    alias = "hpu"
