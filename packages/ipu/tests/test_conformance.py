"""The plugin, accelerator and strategy of this distribution pass the conformance kit; on the simulator."""

from __future__ import annotations

from typing import ClassVar

from dstrat.testing import AcceleratorSuite, PluginSuite, StrategySuite

WHOLE_CALLS = "shapes are static: what does not fill a call is left out of the epoch, which is logged"


class TestPlugin(PluginSuite):
    distribution = "dstrat-ipu"


class TestAccelerator(AcceleratorSuite):
    alias = "ipu"
    expected_failures: ClassVar = {
        "test_it_gives_a_device_of_torch_for_each_index": "no tensor is on an IPU outside of a compiled model"
    }


class TestIPU(StrategySuite):
    alias = "ipu_strategy"
    accelerator = "ipu"
    environ: ClassVar = {"POPTORCH_SIMULATED_IPUS": "8"}
    world_sizes = (1,)
    expected_failures: ClassVar = {
        "test_clipping_by_value_comes_after_averaging": "poptorch clips by norm only; anything else is an error",
        "test_the_last_group_of_an_epoch_may_have_fewer_batches": WHOLE_CALLS,
        "test_validation_counts_each_sample_once": WHOLE_CALLS,
        "test_testing_counts_each_sample_once": WHOLE_CALLS,
        "test_predictions_come_once_and_in_order": WHOLE_CALLS,
    }


class TestReplicas(TestIPU):
    """Two IPUs in the one process, each with a replica that reads batches of the loader's size."""

    devices_per_process = 2
