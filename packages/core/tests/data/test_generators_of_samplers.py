"""Checkpoints have the states of generators that samplers draw from, on several ranks too."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from dstrat.data.resume import generator_states, set_generator_states
from dstrat.data.samplers import AgreedSampler, BroadcastOrder, RankSampler


def weighted():
    generator = torch.Generator().manual_seed(3)
    return WeightedRandomSampler(torch.arange(1.0, 25.0), 24, generator=generator)


class OwnBatches:
    """A batch sampler of a user, around a sampler."""

    def __init__(self):
        self.sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(4))

    def __iter__(self):
        return iter(BatchSampler(self.sampler, 4, drop_last=False))

    def __len__(self):
        return 6


def divided():
    return RankSampler(BroadcastOrder(weighted(), lambda drawn: drawn), length=24, num_replicas=2, rank=1)


def shared():
    batches = OwnBatches()
    return AgreedSampler(BroadcastOrder(batches, lambda drawn: drawn), batches)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"sampler": weighted()},
        lambda: {"batch_sampler": OwnBatches()},
        lambda: {"sampler": divided()},
        lambda: {"batch_sampler": shared()},
    ],
)
def test_an_epoch_is_read_again_in_its_order(options):
    loader = DataLoader(range(24), **options())
    first = [batch.tolist() for batch in loader]
    states = generator_states(loader)
    second = [batch.tolist() for batch in loader]
    assert second != first
    set_generator_states(loader, states)
    assert [batch.tolist() for batch in loader] == second
