"""The aliases of this distribution pass the conformance kit."""

from typing import ClassVar

import pytest
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from dstrat.testing import PluginSuite, StrategySuite


class TestPlugin(PluginSuite):
    distribution = "dstrat-fsdp"


class TestFSDP(StrategySuite):
    alias = "fsdp"
    world_sizes = (1, 2)


class TestFSDPOnFourRanks(StrategySuite):
    alias = "fsdp"
    world_sizes = (2, 4)
    pytestmark = pytest.mark.variant


class TestFSDPOffloaded(StrategySuite):
    alias = "fsdp_cpu_offload"
    world_sizes = (2,)
    pytestmark = pytest.mark.variant


def split_first_layer(module):
    """Split a layer over the ranks that share a batch."""
    plan = {"layers.0": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(module, module.device_mesh["tensor_parallel"], plan)


class TestModelParallel(StrategySuite):
    """Two ranks share each batch and a layer."""

    alias = "model_parallel"
    options: ClassVar = {"tensor_parallel_size": 2}
    configure_model = staticmethod(split_first_layer)
    world_sizes = (2,)
    expected_failures: ClassVar = {
        "test_a_checkpoint_goes_on_on_another_number_of_ranks": "one rank cannot share a layer; four can, as below",
    }


class TestModelParallelOnFourRanks(StrategySuite):
    """Two pairs of ranks share the data, which test_model_parallel.py shows too."""

    alias = "model_parallel"
    options: ClassVar = {"tensor_parallel_size": 2}
    configure_model = staticmethod(split_first_layer)
    world_sizes = (2, 4)
    pytestmark = pytest.mark.variant


class TestModelParallelWithoutSplitLayers(StrategySuite):
    """Groups of one rank each: the same as fsdp."""

    alias = "model_parallel"
    options: ClassVar = {"tensor_parallel_size": 1}
    world_sizes = (2,)
    pytestmark = pytest.mark.variant
