"""The plugin, accelerator and checkpoint io of this distribution pass the conformance kit."""

from __future__ import annotations

from dstrat.testing import AcceleratorSuite, CheckpointIOSuite, PluginSuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-xla"


class TestAccelerator(AcceleratorSuite):
    alias = "xla"


class TestCheckpointIO(CheckpointIOSuite):
    alias = "xla"
