"""The aliases of this distribution pass the conformance kit, as a single replica group of several ranks."""

from typing import ClassVar

import pytest
from packages.torchft.tests.lighthouse import free_port, running_lighthouse

from dstrat.testing import PluginSuite, StrategySuite

PORT, DILOCO_PORT = free_port(), free_port()


class TestPlugin(PluginSuite):
    distribution = "dstrat-torchft"


class TestTorchFT(StrategySuite):
    """Each training is another group for the lighthouse, which waits for the one before until that is dead."""

    alias = "torchft_ddp"
    world_sizes = (1, 2)
    environ: ClassVar = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{PORT}"}
    pytestmark: ClassVar = [pytest.mark.clusters, pytest.mark.slow]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def lighthouse(cls):
        with running_lighthouse(PORT, heartbeat_timeout=0.4, join_timeout=0.1):
            yield


class TestTorchFTDiLoCo(StrategySuite):
    """A single replica group, whose outer step changes nothing: it equals ddp."""

    alias = "torchft_diloco"
    options: ClassVar = {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    world_sizes = (1, 2)
    environ: ClassVar = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{DILOCO_PORT}"}
    pytestmark: ClassVar = [pytest.mark.clusters, pytest.mark.slow]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def lighthouse(cls):
        with running_lighthouse(DILOCO_PORT, heartbeat_timeout=0.4, join_timeout=0.1):
            yield
