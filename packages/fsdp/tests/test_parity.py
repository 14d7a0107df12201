"""The losses of fsdp are those of one device, with the same global batches, in float32."""

import pytest
from fsdp_loop import Block, Net, parts, single_device_losses, start, train

from dstrat_fsdp import FSDPStrategy

TOLERANCE = {"rel": 1e-6, "abs": 0}

OPTIONS = {
    "gradients sharded, parameters kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "replicas": {"sharding_strategy": "NO_SHARD"},
    "offloading": {"cpu_offload": True},
    "gathering late": {"backward_prefetch": "BACKWARD_POST"},
    "blocks that are kept": {"reshard_after_forward": False},
    "small blocks": {"auto_wrap_policy": 1},
}
TRAINING = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "clipping by norm": {"clip": 0.05},
    "clipping by value": {"clip": 0.03, "algorithm": "value"},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05},
}


def fsdp_losses(cluster, options, training, precision="32-true"):
    strategy = FSDPStrategy(**options)
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
    for losses in ranks(fsdp_losses, world_size, options={}, training=TRAINING[way]):
        assert losses == pytest.approx(expected[way], **TOLERANCE)


@pytest.mark.parametrize("way", ["plain", "accumulation and clipping"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_leave_the_losses_as_they_are(ranks, expected, option, way):
    for losses in ranks(fsdp_losses, options=OPTIONS[option], training=TRAINING[way]):
        assert losses == pytest.approx(expected[way], **TOLERANCE)


@pytest.mark.parametrize("way", ["plain", "accumulation and clipping"])
def test_replicas_of_shards_leave_the_losses_as_they_are(ranks, expected, way):
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    for losses in ranks(fsdp_losses, 4, options=options, training=TRAINING[way]):
        assert losses == pytest.approx(expected[way], **TOLERANCE)


def checkpointed_losses(cluster):
    return fsdp_losses(cluster, {"activation_checkpointing": Block}, {})


def test_computing_activations_again_leaves_the_losses_as_they_are(ranks, expected):
    for losses in ranks(checkpointed_losses):
        assert losses == pytest.approx(expected["plain"], **TOLERANCE)
