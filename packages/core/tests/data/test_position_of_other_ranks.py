"""The position in an epoch that another number of ranks has begun."""

from itertools import product
from math import ceil, floor

import pytest

from dstrat.data.resume import convert_position


@pytest.mark.parametrize("rounded", [ceil, floor])
def test_each_sample_is_read_and_no_whole_batch_again(rounded):
    """Lengths are those of loaders that divide samples by DistributedSampler, without and with drop_last."""
    num_converted = 0
    for samples, batch_size, saved, now in product(range(1, 25), range(1, 5), range(1, 5), range(1, 5)):
        saved_length, length = (rounded(ceil(samples / ranks) / batch_size) for ranks in (saved, now))
        for done in range(saved_length if length else 0):
            converted, _ = convert_position(
                done, saved_length=saved_length, saved_readers=saved, length=length, readers=now
            )
            assert converted == min(done * saved // now, length), (samples, batch_size, saved, now, done)
            num_converted += 1
    assert num_converted > 1000


def test_an_epoch_that_is_over_stays_over():
    assert convert_position(3, saved_length=3, saved_readers=3, length=3, readers=4)[0] == 3


def test_other_batch_sizes_go_on_at_the_same_fraction_of_the_epoch():
    position, ratio = convert_position(4, saved_length=6, saved_readers=1, length=6, readers=2)
    assert (position, ratio) == (4, 1)


def test_ranks_that_read_the_same_batches_are_no_reason_to_convert():
    shared = {"saved_samples": [8], "samples": [8]}  # of two ranks that split layers, and then of one
    assert convert_position(2, saved_length=4, saved_readers=2, length=4, readers=1, **shared) == (2, 1)
