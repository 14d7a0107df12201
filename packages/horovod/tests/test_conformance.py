"""The components of this distribution pass the conformance kit."""

from typing import ClassVar

import pytest

from dstrat.testing import ClusterEnvironmentSuite, PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-horovod"


class TestHorovod(StrategySuite):
    alias = "horovod"
    world_sizes = (1, 2)


class TestHorovodOnFourRanks(StrategySuite):
    """Each gradient is reduced alone: with more than two ranks a run is not repeatable otherwise.

    The order in which Horovod adds the values of ranks depends on where a gradient is among those that are sent
    together, and which those are depends on time.
    """

    alias = "horovod"
    world_sizes = (2, 4)
    environ: ClassVar = {"HOROVOD_FUSION_THRESHOLD": "0"}
    pytestmark = pytest.mark.variant


class TestHorovodWithGroups(StrategySuite):
    alias = "horovod"
    options: ClassVar = {"num_groups": 2}
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


class TestHorovodAdasum(StrategySuite):
    """Adasum is another algorithm: its losses are those of no single device."""

    alias = "horovod"
    options: ClassVar = {"op": "Adasum"}
    world_sizes = (2,)
    gives_losses_of_one_device = False
    expected_failures: ClassVar = {
        "test_it_trains_in_each_precision_that_it_declares[16-true]": "updates are rounded to float16",
    }
    pytestmark = pytest.mark.variant


class TestHorovodrun(ClusterEnvironmentSuite):
    alias = "horovodrun"

    @staticmethod
    def rank_environ(rank, world_size):
        return {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(world_size),
            "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": str(world_size),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "29123",
        }
