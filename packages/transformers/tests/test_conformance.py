"""The records of this distribution pass the conformance kit."""

from dstrat.testing import PluginSuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-transformers"
