"""The alias that runs on the CPU passes the conformance kit, where Colossal-AI is installed."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite

pytest.importorskip("colossalai", reason="needs colossalai")


class TestPlugin(PluginSuite):
    distribution = "dstrat-colossalai"


class TestTorchDDP(StrategySuite):
    alias = "colossalai_torch_ddp"
    world_sizes = (1, 2)
    expected_failures: ClassVar = {
        "test_manual_optimization_trains_as_on_one_device": "the backward pass would run within the wrapper's forward"
    }
    pytestmark = pytest.mark.variant  # beside those of ddp; importing Colossal-AI in each new rank takes minutes
