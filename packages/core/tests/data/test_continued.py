"""What the order of an epoch's batches follows from."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from dstrat.data.loaders import prepare_training_loader
from dstrat.data.resume import Beginning


@pytest.fixture
def shuffled_with(process):
    """Makes this process's part of loaders, shuffled by a seed."""

    def make(seed):
        torch.manual_seed(seed)
        loaders = {name: DataLoader(range(16), batch_size=2, shuffle=True) for name in ("one", "other")}
        return prepare_training_loader(loaders, process(0, 2), distribute=True)

    return make


def order(loader):
    return [torch.cat(list(part)).tolist() for part in loader.flattened]


def test_each_of_several_loaders_is_shuffled_as_the_one_whose_epoch_it_was(shuffled_with):
    saved = Beginning.of(shuffled_with(1)).state_dict()
    other = shuffled_with(2)
    Beginning.from_state_dict(saved).share_order(other)
    assert order(other) == order(shuffled_with(1)) != order(shuffled_with(2))


@pytest.mark.parametrize("seed", [None, 7])
def test_a_checkpoint_that_has_the_seed_of_one_loader_is_read(shuffled_with, seed):
    loader = shuffled_with(1).flattened[0]
    saved = Beginning.of(loader).state_dict()
    del saved["seeds"]
    Beginning.from_state_dict(saved | {"seed": seed}).restore(loader)
    assert loader.sampler.order.seed == (1 if seed is None else seed)
