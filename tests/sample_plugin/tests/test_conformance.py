"""The strategy is one: dstrat's own standard tests."""

from typing import ClassVar

from dstrat.testing import PluginSuite, StrategySuite


class TestDiLoCo(StrategySuite):
    alias = "acme_diloco"
    options: ClassVar = {"inner_steps": 5}
    gives_losses_of_one_device = False  # each process trains on what it sees, until a round ends


class TestPlugin(PluginSuite):
    distribution = "acme-diloco"
