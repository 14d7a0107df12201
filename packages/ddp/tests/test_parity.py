"""The losses of ddp are those of one device, with the same global batches, in float32."""

import pytest
from ddp_loop import Net, parts, single_device_losses, start, train

from dstrat_ddp import DDPStrategy

TOLERANCE = {"rel": 1e-6, "abs": 0}

KEYWORDS = {
    "static_graph": {"static_graph": True},
    "gradients as bucket views": {"gradient_as_bucket_view": True},
    "a search for unused parameters": {"find_unused_parameters": True},
    "many buckets": {"bucket_cap_mb": 0.0001},
}
TRAINING = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping by norm": {"clip": 0.05},
    "clipping by value": {"clip": 0.03, "algorithm": "value"},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05},
}


def ddp_losses(cluster, keywords, training, precision="32-true"):
    strategy = DDPStrategy(**keywords)
    start(strategy, Net(), parts(cluster, precision))
    losses = train(strategy, **training)
    strategy.teardown()
    return losses


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    losses = {name: single_device_losses(**training) for name, training in TRAINING.items()}
    assert losses["plain"][-1] < losses["plain"][0] / 2  # it learns, so that there is something to compare
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # each way makes a difference
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("way", TRAINING)
def test_losses_are_those_of_one_device(ranks, expected, world_size, way):
    for losses in ranks(ddp_losses, world_size, keywords={}, training=TRAINING[way]):
        assert losses == pytest.approx(expected[way], **TOLERANCE)


@pytest.mark.parametrize("way", ["plain", "accumulation and clipping"])
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_keywords_of_ddp_leave_the_losses_as_they_are(ranks, expected, keyword, way):
    for losses in ranks(ddp_losses, keywords=KEYWORDS[keyword], training=TRAINING[way]):
        assert losses == pytest.approx(expected[way], **TOLERANCE)


@pytest.mark.parametrize(("precision", "relative"), [("64-true", 1e-12), ("bf16-mixed", 0.02), ("16-mixed", 0.01)])
def test_other_precisions_give_the_losses_of_one_device_in_them(ranks, precision, relative):
    expected = single_device_losses(precision=precision, clip=0.05)
    for losses in ranks(ddp_losses, keywords={}, training={"clip": 0.05}, precision=precision):
        assert losses == pytest.approx(expected, rel=relative)
