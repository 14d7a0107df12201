"""The alias of this distribution passes the conformance kit, as DiLoCo and as what equals one device."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-diloco"


class TestDiLoCo(StrategySuite):
    alias = "diloco"
    options: ClassVar = {"every": 2}
    gives_losses_of_one_device = False
    world_sizes = (1, 2)


class TestDiLoCoOfFSDP(StrategySuite):
    """Groups of one rank, in fragments with delay."""

    alias = "diloco"
    options: ClassVar = {"inner": "fsdp", "every": 2, "fragments": 2, "delay": 1}
    gives_losses_of_one_device = False
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestPairsWithFSDP(StrategySuite):
    """Two groups of two ranks each, in fragments with delay."""

    alias = "diloco"
    options: ClassVar = {"inner": "fsdp", "groups": 2, "every": 2, "fragments": 2, "delay": 1}
    gives_losses_of_one_device = False
    world_sizes = (4,)
    pytestmark = pytest.mark.variant
    expected_failures: ClassVar = {
        "test_it_trains_in_each_precision_that_it_declares": "the kit trains on one rank, which are not two groups",
    }


@pytest.mark.variant
class TestOneGroup(StrategySuite):
    """One group, whose outer step changes nothing: it equals ddp."""

    alias = "diloco"
    options: ClassVar = {"groups": 1, "every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    world_sizes = (2,)
