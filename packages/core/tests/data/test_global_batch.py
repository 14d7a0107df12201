"""The samples of an optimizer step, divided over fewer ranks than before."""

from fractions import Fraction
from itertools import product
from math import ceil

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.division import with_share
from dstrat.data.global_batch import (
    BatchDivision,
    batch_sizes_of,
    divide_global_batch,
    drops_samples,
    epoch_lengths,
)
from dstrat.data.resume import convert_position


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def divide(size, ranks, fewer, accumulate=1, **options):
    return divide_global_batch([size], accumulate=accumulate, ranks=ranks, fewer=fewer, **options)


def test_fewer_ranks_accumulate_smaller_batches():
    assert divide(4, 3, 2) == BatchDivision(accumulate=2, share=Fraction(3, 4))
    assert divide(2, 3, 2) == BatchDivision(accumulate=3, share=Fraction(1, 2))
    assert divide(4, 3, 1) == BatchDivision(accumulate=3, share=Fraction(1))
    assert divide(4, 4, 2, accumulate=3) == BatchDivision(accumulate=6, share=Fraction(1))
    assert divide(1, 3, 2, accumulate=2) == BatchDivision(accumulate=3, share=Fraction(1))
    assert divide(5, 3, 3, accumulate=2) == BatchDivision(accumulate=2, share=Fraction(1))


def test_each_division_has_the_same_samples_and_no_larger_batch():
    num_divided = 0
    for size, ranks, fewer, accumulate in product(range(1, 13), range(1, 7), range(1, 7), range(1, 4)):
        division = divide(size, ranks, fewer, accumulate) if fewer <= ranks else None
        samples = size * ranks * accumulate
        if division is not None:
            batch = size * division.share
            assert batch.denominator == 1
            assert 1 <= batch <= size
            assert batch * fewer * division.accumulate == samples
            num_divided += 1
        elif fewer <= ranks:
            assert samples % fewer != 0
    assert num_divided > 300


def test_samples_that_cannot_be_divided_evenly_are_no_division():
    assert divide(4, 4, 3) is None
    assert divide_global_batch([4, 3], accumulate=1, ranks=3, fewer=2) is None  # 6 and 4.5 samples for each rank


def test_without_accumulation_batches_become_larger():
    assert divide(4, 3, 2, accumulates=False) == BatchDivision(accumulate=1, share=Fraction(3, 2))
    assert divide(3, 3, 2, accumulates=False) is None


def test_batch_sizes_of_loaders_that_dstrat_divides():
    data = torch.arange(24)
    plain = DataLoader(data, batch_size=4, shuffle=True)
    assert batch_sizes_of(plain) == [4]
    assert batch_sizes_of({"a": plain, "b": DataLoader(data, batch_size=6)}) == [4, 6]
    assert batch_sizes_of(CombinedLoader([plain, plain])) == [4, 4]
    assert batch_sizes_of(DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, False))) == [3]


class Permuted(Sampler):
    """Draws each order from a generator of numpy, which nothing sets back."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.generator.permutation(8).tolist())

    def __len__(self):
        return 8


class Counted(Permuted):
    def set_epoch(self, epoch):
        self.generator = np.random.default_rng(epoch)


def test_samplers_that_count_epochs_are_divided_anew():
    assert batch_sizes_of(DataLoader(torch.arange(8), batch_size=2, sampler=Counted())) == [2]


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(4, 2)],
        DataLoader(Stream(), batch_size=4),
        DataLoader(torch.arange(8), batch_size=None),
        DataLoader(torch.arange(8), batch_size=2, sampler=DistributedSampler(range(8), num_replicas=2, rank=0)),
        DataLoader(torch.arange(8), batch_size=2, sampler=Permuted()),
    ],
)
def test_batches_of_other_loaders_cannot_be_divided_anew(loader):
    assert batch_sizes_of([loader] if isinstance(loader, list) else loader) is None


def test_loader_with_a_share_of_its_batches_reads_the_same_samples():
    loader = DataLoader(torch.arange(24), batch_size=4, drop_last=True)
    smaller = with_share(loader, Fraction(3, 4))
    assert [batch.tolist() for batch in smaller][:2] == [[0, 1, 2], [3, 4, 5]]
    assert (smaller.batch_size, len(smaller), loader.batch_size, len(loader)) == (3, 8, 4, 6)


@pytest.mark.parametrize("num_samples", range(40, 60))
def test_position_with_other_batches_is_at_the_same_sample(num_samples):
    """Of 3 ranks with batches of 4 samples, and 2 ranks with batches of 3."""
    saved_length, length = (ceil(ceil(num_samples / ranks) / size) for ranks, size in ((3, 4), (2, 3)))
    for done in range(saved_length):
        position, ratio = convert_position(
            done,
            saved_length=saved_length,
            saved_readers=3,
            length=length,
            readers=2,
            saved_samples=[4],
            samples=[3],
        )
        assert (position, ratio) == (min(2 * done, length), 2)


def test_the_batches_of_an_epoch_are_those_that_each_rank_reads():
    for samples, size, ranks, drops in product(range(1, 30), range(1, 5), range(1, 4), (True, False)):
        loader = DataLoader(range(samples), size, drop_last=drops)
        of_rank = DistributedSampler(range(samples), ranks, 0, shuffle=False)
        assert epoch_lengths(loader, ranks=ranks) == [
            len(DataLoader(range(samples), size, sampler=of_rank, drop_last=drops))
        ]
        assert drops_samples({"a": DataLoader(range(4), 2), "b": loader}) == drops
    loader = DataLoader(range(56), 8, drop_last=True)
    assert epoch_lengths([loader, loader], ranks=2, share=Fraction(1, 2)) == [7, 7]
