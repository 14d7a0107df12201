"""Losses of several ranks, beside those of one device with the same global batches."""

import pytest
from tests.hand_loop import Net, losses_of, parts, single_device_losses
from tests.ranks import each, in_ranks
from tests.ways_of_training import WAYS, losses_of_one_device

from dstrat_horovod import HorovodStrategy

OPTIONS = {
    "two groups": {"num_groups": 2},
    "groups by name": {"groups": [["layers.0.weight", "layers.0.bias"], ["layers.4.weight"]]},
    "an average in two steps": {"gradient_predivide_factor": 1.5},
    "sparse gradients as dense ones": {"sparse_as_dense": True},
}
OF_PRECISIONS = {"64-true": 1e-12, "bf16-mixed": 0.02, "16-mixed": 0.01}
OF_FP16 = 2e-3
"""Relative difference of losses over 20 steps whose gradients were sent in float16; the README states it."""


def horovod_losses(cluster, options, training, precision="32-true"):
    return losses_of(HorovodStrategy(**options), Net(), parts(cluster, precision), **training)


@pytest.fixture(scope="module")
def expected():
    """Losses of one device for each way of training."""
    return losses_of_one_device(Net)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_are_those_of_one_device(expected, world_size):
    cases = {way: {"options": {}, "training": training} for way, training in WAYS.items()}
    for losses in in_ranks(each, world_size, function=horovod_losses, cases=cases):
        assert losses == expected


def test_options_of_horovod_leave_the_losses_as_they_are(expected):
    ways = ("plain", "accumulation and clipping")
    cases = {
        (name, way): {"options": options, "training": WAYS[way]} for name, options in OPTIONS.items() for way in ways
    }
    for losses in in_ranks(each, function=horovod_losses, cases=cases):
        assert losses == {(name, way): expected[way] for name, way in cases}


def test_other_precisions_give_the_losses_of_one_device_in_them():
    expected = {
        precision: pytest.approx(single_device_losses(Net(), precision=precision, clip=0.05), rel=relative)
        for precision, relative in OF_PRECISIONS.items()
    }
    cases = {name: {"options": {}, "training": {"clip": 0.05}, "precision": name} for name in OF_PRECISIONS}
    for losses in in_ranks(each, function=horovod_losses, cases=cases):
        assert losses == expected


def test_compressed_gradients_change_the_losses_by_little():
    exact = single_device_losses(Net())
    cases = {"fp16": {"options": {"compression": "fp16"}, "training": {}}}
    for losses in in_ranks(each, function=horovod_losses, cases=cases):
        assert losses["fp16"] == pytest.approx(exact, rel=OF_FP16)
        assert losses["fp16"] != pytest.approx(exact, rel=1e-6)  # they are compressed
