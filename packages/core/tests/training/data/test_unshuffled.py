"""Loaders that give the same batches in every epoch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler

from dstrat import CombinedLoader
from dstrat.data.loaders import sequential


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def numbers(**options):
    return DataLoader(list(range(8)), **options)


def read(loader):
    return [batch.tolist() for batch in loader]


def test_a_shuffled_loader_gives_the_order_of_the_dataset():
    loader = numbers(shuffle=True, batch_size=3)
    assert read(sequential(loader)) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert isinstance(loader.sampler, RandomSampler)  # the user's own is left alone


def test_a_loader_that_does_not_shuffle_is_left_as_it_is():
    loader = numbers()
    assert sequential(loader) is loader


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(5)), "batch_size": 2},
        {"batch_sampler": type("Own", (BatchSampler,), {})(RandomSampler(range(8)), 3, drop_last=False)},
    ],
    ids=["sampler", "batch sampler"],
)
def test_a_sampler_of_the_users_own_draws_once(options):
    torch.manual_seed(0)
    loader = numbers(**options)
    fixed = sequential(loader)
    assert read(fixed) == read(fixed)
    assert sorted(itertools.chain(*read(fixed))) == sorted(itertools.chain(*read(loader)))


def test_loaders_keep_their_structure():
    given = {"a": numbers(shuffle=True), "b": [numbers()]}
    found = sequential(given)
    assert read(found["a"]) == read(found["b"][0])
    combined = sequential(CombinedLoader(given, "max_size"))
    assert combined.mode == "max_size"
    assert read(combined.iterables["a"]) == read(found["a"])


def test_what_cannot_be_kept_from_shuffling_is_told(caplog):
    loader = DataLoader(Stream())
    assert sequential(loader) is loader
    assert "a DataLoader cannot be kept from shuffling: overfit_batches takes what it gives" in caplog.text


def test_training_on_a_few_batches_sees_the_same_in_each_epoch(quiet_trainer, make_line, loader):
    seen = []

    class Noting(type(make_line())):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0].sum().item())
            return self.loss(batch)

    quiet_trainer(overfit_batches=2, max_epochs=3).fit(make_line(Noting), loader(shuffle=True))
    assert seen == seen[:2] * 3
