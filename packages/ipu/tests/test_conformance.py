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
        "test_uneven_groups_are_the_mean_of_their_batches": WHOLE_CALLS,
        "test_groups_of_a_loader_without_a_length_are_the_mean_of_their_batches": WHOLE_CALLS,
        "test_ranks_with_uneven_samples_take_the_same_steps": WHOLE_CALLS,
        "test_a_batch_without_a_loss_is_left_out_of_its_step": "poptorch compiles a step with its loss for all batches",
        "test_validation_counts_each_sample_once": WHOLE_CALLS,
        "test_testing_counts_each_sample_once": WHOLE_CALLS,
        "test_predictions_come_once_and_in_order": WHOLE_CALLS,
    }


class TestReplicas(TestIPU):
    """Two IPUs in the one process, each with a replica that reads batches of the loader's size."""

    devices_per_process = 2
