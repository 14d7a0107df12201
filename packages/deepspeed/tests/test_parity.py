"""The losses of each stage are those of one device, with the same global batches, in float32."""

import pytest
from deepspeed_loop import Net, losses_of, parts, single_device_losses

from dstrat_deepspeed import DeepSpeedStrategy

TOLERANCE = {"rel": 1e-6, "abs": 0}
STAGES = (0, 1, 2, 3)
TRAINING = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping": {"clip": 0.05},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05},
}


def deepspeed_losses(cluster, options, ways):
    """Train in each way, one after the other in one process."""
    return [losses_of(DeepSpeedStrategy(**options), Net(), parts(cluster), **TRAINING[way]) for way in ways]


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    losses = {name: single_device_losses(**training) for name, training in TRAINING.items()}
    assert losses["plain"][-1] < losses["plain"][0] / 2  # it learns, so that there is something to compare
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # each way makes a difference
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_one_device_with_accumulation_and_clipping_on_and_off(ranks, expected, stage):
    for found in ranks(deepspeed_losses, options={"stage": stage}, ways=list(TRAINING)):
        for way, losses in zip(TRAINING, found, strict=True):
            assert losses == pytest.approx(expected[way], **TOLERANCE), way
