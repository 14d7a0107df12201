"""The losses of each stage are those of one device, with the same global batches, in float32."""

import pytest
from deepspeed_loop import Net, parts, start, train

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)
WAYS = {  # what changes during a training, as with GradientAccumulationScheduler
    "accumulation that begins later": [{}, {"accumulate": 3}],
    "clipping": [{"clip": 0.05}],
    "accumulation and clipping": [{"accumulate": 2, "clip": 0.05}],
}


def losses_of(strategy, given, phases):
    start(strategy, Net(), given, **phases[0])
    losses = [loss for phase in phases for loss in train(strategy, steps=5, **phase)]
    strategy.teardown()
    return losses


def deepspeed_losses(cluster, stage):
    """Train in each way, one after the other in one process."""
    return {way: losses_of(DeepSpeedStrategy(stage=stage), parts(cluster), phases) for way, phases in WAYS.items()}


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    losses = {way: losses_of(SingleDeviceStrategy(), parts(), phases) for way, phases in WAYS.items()}
    assert losses["clipping"][-1] < 0.8 * losses["clipping"][0]  # it learns, so that there is something to compare
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # each way makes a difference
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_device_with_accumulation_and_clipping_on_and_off(ranks, expected, stage):
    for found in ranks(deepspeed_losses, stage=stage):
        for way, losses in expected.items():
            assert found[way] == pytest.approx(losses, rel=1e-6, abs=0), way
