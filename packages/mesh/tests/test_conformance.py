"""The alias of this distribution passes the conformance kit."""

from typing import ClassVar

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-mesh"


def split_first_layer(module):
    """Split a layer over the ranks that share a batch."""
    plan = {"layers.0": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(module, module.device_mesh["tp"], plan)


class TestSplit(StrategySuite):
    """Two ranks share each batch and a layer."""

    alias = "mesh"
    options: ClassVar = {"tp": 2}
    configure_model = staticmethod(split_first_layer)
    world_sizes = (2,)
    expected_failures: ClassVar = {
        "test_a_checkpoint_goes_on_on_another_number_of_ranks": "one rank cannot share a layer; four can",
    }


@pytest.mark.variant
class TestReplicated(StrategySuite):
    """Two replicas, each on one rank."""

    alias = "mesh"
    options: ClassVar = {"dp_replicate": 2}
    world_sizes = (2,)
    expected_failures: ClassVar = {
        "test_a_checkpoint_goes_on_on_another_number_of_ranks": "one rank cannot be two replicas; four can",
    }


class TestSharded(StrategySuite):
    """The same as fsdp."""

    alias = "mesh"
    world_sizes = (1, 2)
    pytestmark = pytest.mark.variant
