"""The aliases of this distribution pass the conformance kit."""

from typing import ClassVar

import pytest

from dstrat.testing import PluginSuite, StrategySuite

HALF = "test_it_trains_in_each_precision_that_it_declares[16-mixed]"
EXPECTED = {
    HALF: "DeepSpeed has no float16 on the CPU, which is an error before anything starts",
    "test_clipping_by_value_comes_after_averaging": "DeepSpeed clips by norm only; anything else is an error",
}
FLAT = "ZeRO puts flat partitions in the place of parameters, into the same optimizer"


class TestPlugin(PluginSuite):
    distribution = "dstrat-deepspeed"


class TestDeepSpeed(StrategySuite):
    """Stage 2."""

    alias = "deepspeed"
    world_sizes = (1, 2)
    expected_failures: ClassVar = EXPECTED | {"test_optimizers_are_of_the_parameters_that_train": FLAT}


class TestDeepSpeedOnFourRanks(StrategySuite):
    alias = "deepspeed"
    world_sizes = (2, 4)
    expected_failures: ClassVar = EXPECTED | {"test_optimizers_are_of_the_parameters_that_train": FLAT}
    pytestmark = pytest.mark.variant


class TestDeepSpeedStage3(StrategySuite):
    alias = "deepspeed_stage_3"
    world_sizes = (2,)
    expected_failures: ClassVar = EXPECTED


class TestDeepSpeedStage0(StrategySuite):
    """Ranks hold replicas, unlike those of the other stages."""

    alias = "deepspeed_stage_0"
    world_sizes = (2,)
    expected_failures: ClassVar = EXPECTED
    pytestmark = pytest.mark.variant


@pytest.mark.parametrize(
    "test",
    [
        "test_every_rank_has_the_same_parameters_at_the_end",
        "test_the_user_gets_the_trained_module_back",
        "test_the_last_group_of_an_epoch_may_have_fewer_batches",
    ],
)
def test_stage_0_passes_where_it_is_unlike_other_stages(test):
    getattr(TestDeepSpeedStage0(), test)(2)
