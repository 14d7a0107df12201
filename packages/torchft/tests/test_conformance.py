"""The alias of this distribution passes the conformance kit, as a single replica group of several ranks."""

from typing import ClassVar

import pytest
from packages.torchft.tests.lighthouse import free_port, running_lighthouse

from dstrat.testing import PluginSuite, StrategySuite

PORT = free_port()


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
