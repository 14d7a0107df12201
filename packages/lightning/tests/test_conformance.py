"""The records and the checkpoint io of this distribution pass the conformance kit."""

from dstrat.testing import CheckpointIOSuite, PluginSuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-lightning"


class TestFiles(CheckpointIOSuite):
    alias = "lightning"
