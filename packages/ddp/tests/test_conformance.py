"""The aliases of this distribution pass the conformance kit."""

import pytest

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-ddp"


class TestDDP(StrategySuite):
    alias = "ddp"


class TestDDPSpawn(StrategySuite):
    alias = "ddp_spawn"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestDDPFork(StrategySuite):
    alias = "ddp_fork"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestDDPNotebook(StrategySuite):
    alias = "ddp_notebook"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestDDPFindUnusedParameters(StrategySuite):
    alias = "ddp_find_unused_parameters_true"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestDataParallel(StrategySuite):
    alias = "dp"
    world_sizes = (1,)


class TestDDP2(StrategySuite):
    alias = "ddp2"
    world_sizes = (1,)
