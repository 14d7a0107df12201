"""The aliases of this distribution pass the conformance kit."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-fsdp"


class TestFSDP(StrategySuite):
    alias = "fsdp"


class TestFSDPOffloaded(StrategySuite):
    alias = "fsdp_cpu_offload"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestModelParallel(StrategySuite):
    """Groups of one rank each: the same as fsdp."""

    alias = "model_parallel"
    options: ClassVar = {"tensor_parallel_size": 1}
    world_sizes = (2,)
