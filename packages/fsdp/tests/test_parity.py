"""The losses of fsdp are those of one device, with the same global batches, in float32."""

import pytest
from tests.hand_loop import Block, BlockNet, losses_of, parts, single_device_losses
from tests.ranks import each, in_ranks

from dstrat_fsdp import FSDPStrategy

TOLERANCE = {"rel": 1e-6, "abs": 0}

OPTIONS = {
    "gradients sharded, parameters kept": {"sharding_strategy": "SHARD_GRAD_OP"},
    "replicas": {"sharding_strategy": "NO_SHARD"},
    "offloading": {"cpu_offload": True},
    "gathering late": {"backward_prefetch": "BACKWARD_POST"},
    "blocks that are kept": {"reshard_after_forward": False},
    "small blocks": {"auto_wrap_policy": 1},
    "activations computed again": {"activation_checkpointing": Block},
}
SHORT = {"steps": 6}  # enough to show a difference
TRAINING = {
    "plain": {},
    "accumulation": {"accumulate": 3, **SHORT},
    "clipping by norm": {"clip": 0.05, **SHORT},
    "clipping by value": {"clip": 0.03, "algorithm": "value", **SHORT},
    "accumulation and clipping": {"accumulate": 2, "clip": 0.05, **SHORT},
}
SOME_WAYS = ("accumulation", "clipping by norm")


def fsdp_losses(cluster, options, training):
    return losses_of(FSDPStrategy(**options), BlockNet(), parts(cluster), **training)


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    losses = {name: single_device_losses(BlockNet(), **training) for name, training in TRAINING.items()}
    assert losses["plain"][-1] < losses["plain"][0] / 2  # it learns, so that there is something to compare
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # each way makes a difference
    return {name: pytest.approx(values, **TOLERANCE) for name, values in losses.items()}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_are_those_of_one_device(expected, world_size):
    cases = {way: {"options": {}, "training": training} for way, training in TRAINING.items()}
    for losses in in_ranks(each, world_size, function=fsdp_losses, cases=cases):
        assert losses == expected


def test_options_leave_the_losses_as_they_are(expected):
    cases = {
        (name, way): {"options": options, "training": TRAINING[way]}
        for name, options in OPTIONS.items()
        for way in SOME_WAYS
    }
    for losses in in_ranks(each, function=fsdp_losses, cases=cases):
        assert losses == {(name, way): expected[way] for name, way in cases}


def test_replicas_of_shards_leave_the_losses_as_they_are(expected):
    options = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)}
    cases = {way: {"options": options, "training": TRAINING[way]} for way in SOME_WAYS}
    for losses in in_ranks(each, 4, function=fsdp_losses, cases=cases):
        assert losses == {way: expected[way] for way in SOME_WAYS}
