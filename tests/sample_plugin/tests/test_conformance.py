"""The strategy is one: dstrat's own standard tests."""

from typing import ClassVar

from dstrat.testing import PluginSuite, StrategySuite


class TestDiLoCo(StrategySuite):
    alias = "diloco"
    options: ClassVar = {"inner_steps": 5}
    gives_losses_of_one_device = False  # each process trains on what it sees, until a round ends
    expected_failures: ClassVar = {
        "test_it_trains_in_each_precision_that_it_declares": "it compares losses with those of one device"
    }


class TestPlugin(PluginSuite):
    distribution = "acme-diloco"
