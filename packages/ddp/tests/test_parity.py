"""The losses of ddp are those of one device, with the same global batches, in float32."""

import pytest
from tests.hand_loop import Net, losses_of, parts, single_device_losses
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

from dstrat_ddp import DDPStrategy

KEYWORDS = {
    "static_graph": {"static_graph": True},
    "gradients as bucket views": {"gradient_as_bucket_view": True},
    "a search for unused parameters": {"find_unused_parameters": True},
    "many buckets": {"bucket_cap_mb": 0.0001},
    "some activations computed again": {"activation_checkpointing": "selective"},
}
OF_PRECISIONS = {"64-true": 1e-12, "bf16-mixed": 0.02, "16-mixed": 0.01}


def ddp_losses(cluster, keywords, training, precision="32-true"):
    return losses_of(DDPStrategy(**keywords), Net(), parts(cluster, precision), **training)


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    return losses_of_one_device(Net)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_are_those_of_one_device(expected, world_size):
    cases = {way: {"keywords": {}, "training": training} for way, training in WAYS.items()}
    for losses in in_ranks(each, world_size, function=ddp_losses, cases=cases):
        assert losses == expected


def test_keywords_of_ddp_leave_the_losses_as_they_are(expected):
    ways = ("plain", "accumulation and clipping")
    cases = {
        (name, way): {"keywords": keywords, "training": WAYS[way]}
        for name, keywords in KEYWORDS.items()
        for way in ways
    }
    for losses in in_ranks(each, function=ddp_losses, cases=cases):
        assert losses == {(name, way): expected[way] for name, way in cases}


def test_other_precisions_give_the_losses_of_one_device_in_them():
    expected = {
        precision: pytest.approx(single_device_losses(Net(), precision=precision, clip=0.05), rel=relative)
        for precision, relative in OF_PRECISIONS.items()
    }
    cases = {name: {"keywords": {}, "training": {"clip": 0.05}, "precision": name} for name in OF_PRECISIONS}
    for losses in in_ranks(each, function=ddp_losses, cases=cases):
        assert losses == expected
