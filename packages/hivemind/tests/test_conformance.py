"""The alias of this distribution passes the conformance kit, where hivemind is installed."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite

pytest.importorskip("hivemind", reason="needs hivemind")


class TestPlugin(PluginSuite):
    distribution = "dstrat-hivemind"


class TestHivemind(StrategySuite):
    """A collaboration of one peer, of which each batch is an epoch: then it trains as one device."""

    alias = "hivemind"
    world_sizes = (1,)
    needs_even_batches = "the collaboration counts samples, so that an epoch of 8 ends in another batch"
    options: ClassVar = {
        "target_batch_size": 8,
        "matchmaking_time": 0.5,
        "averaging_timeout": 2.0,
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
    }
    pytestmark = pytest.mark.slow
