"""The alias passes the conformance kit, with each algorithm; those that are not exact declare it."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-bagua"


class TestGradientAllReduce(StrategySuite):
    alias = "bagua"


class TestByteGrad(StrategySuite):
    alias = "bagua"
    options: ClassVar = {"algorithm": "bytegrad", "hierarchical": False}
    world_sizes = (2,)
    gives_losses_of_one_device = False  # gradients have eight bits
    pytestmark = pytest.mark.variant


class TestByteGradOnOneMachine(StrategySuite):
    alias = "bagua"
    options: ClassVar = {"algorithm": "bytegrad"}
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestDecentralized(StrategySuite):
    alias = "bagua"
    options: ClassVar = {"algorithm": "decentralized", "peer_selection_mode": "shift_one", "hierarchical": False}
    world_sizes = (2, 4)
    gives_losses_of_one_device = False  # replicas differ
    pytestmark = pytest.mark.variant


class TestLowPrecisionDecentralized(StrategySuite):
    alias = "bagua"
    options: ClassVar = {"algorithm": "low_precision_decentralized", "hierarchical": False}
    world_sizes = (2, 4)
    gives_losses_of_one_device = False  # replicas differ
    pytestmark = pytest.mark.variant


class TestAsync(StrategySuite):
    alias = "bagua"
    options: ClassVar = {"algorithm": "async", "sync_interval_ms": 1}
    world_sizes = (2,)
    gives_losses_of_one_device = False  # replicas differ
    is_deterministic = False  # averages come when they come
    pytestmark = pytest.mark.variant
