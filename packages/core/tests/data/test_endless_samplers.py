"""Samplers whose order ends late, or never, among several ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.hand_loop import parts
from tests.ranks import in_ranks
from torch.utils.data import DataLoader, RandomSampler, Sampler

from dstrat.data.loaders import prepare_evaluation_loader, prepare_training_loader
from dstrat.data.samplers import DrawnOrder, RankSampler
from dstrat.errors import RequestError
from dstrat.parallel.strategy import ParallelStrategy

LENGTH = 10**10


def endless(generator=None):
    return RandomSampler(range(50), replacement=True, num_samples=LENGTH, generator=generator)


@pytest.mark.parametrize("has_generator", [False, True])
def test_ranks_draw_the_order_of_one_device(has_generator):
    def sampler():
        return endless(torch.Generator().manual_seed(5) if has_generator else None)

    torch.manual_seed(1)
    expected = list(itertools.islice(sampler(), 12))
    shards = []
    for rank in range(2):
        torch.manual_seed(1)
        shard = RankSampler(DrawnOrder(sampler(), lambda drawn: drawn), length=LENGTH, num_replicas=2, rank=rank)
        assert len(shard) == LENGTH // 2
        shards.append(list(itertools.islice(shard, 6)))
        shard.load_state_dict({"times_read": 1, "num_read": 4})
        torch.manual_seed(1)
        shard.order.sampler = sampler()
        assert list(itertools.islice(shard, 2)) == shards[-1][4:]
    assert [index for pair in zip(*shards, strict=True) for index in pair] == expected


@pytest.mark.parametrize(("length", "num_replicas"), [(7, 3), (2, 5), (0, 2)])
def test_the_start_of_an_order_pads_it(length, num_replicas):
    shards = [
        list(RankSampler(lambda *_: range(length), length=length, num_replicas=num_replicas, rank=rank))
        for rank in range(num_replicas)
    ]
    assert len({len(shard) for shard in shards}) == 1
    in_order = [index for ranks in zip(*shards, strict=True) for index in ranks]
    assert in_order == list(itertools.islice(itertools.cycle(range(length)), len(in_order)))


@pytest.mark.parametrize("length", [33, 36])  # read to the end, and left before it
def test_generators_of_all_ranks_have_drawn_the_same(length):
    def sampler():  # the 11th index of rank 0 is the 31st, and torch draws 32 at a time
        generator = torch.Generator().manual_seed(5)
        return RandomSampler(range(50), replacement=True, num_samples=length, generator=generator)

    one_device = sampler()
    assert len(list(itertools.islice(one_device, 33))) == 33
    for rank in range(3):
        shard = RankSampler(DrawnOrder(sampler(), lambda drawn: drawn), length=length, num_replicas=3, rank=rank)
        assert len(list(itertools.islice(shard, 11))) == 11
        assert torch.equal(shard.order.sampler.generator.get_state(), one_device.generator.get_state())


class Endless(Sampler[int]):
    def __iter__(self):
        return itertools.cycle(range(8))


class Pairs:
    """Batches without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([2 * index, 2 * index + 1] for index in range(self.count))


class Long(Endless):
    def __len__(self):
        return LENGTH


def read_endless(cluster):
    """Return the first batches of a rank, and the errors of samplers that rank 0 cannot draw for all."""
    strategy = ParallelStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()
    torch.manual_seed(1 + strategy.global_rank)  # of which rank 0's counts
    loader = prepare_training_loader(DataLoader(range(50), 2, sampler=endless()), strategy, distribute=True)
    batches = [batch.tolist() for batch in itertools.islice(loader, 3)]
    messages = []
    for sampler, prepare in itertools.product(
        (Endless(), Long()), (prepare_training_loader, prepare_evaluation_loader)
    ):
        with pytest.raises(RequestError) as raised:
            prepare(DataLoader(range(8), 2, sampler=sampler), strategy, distribute=True)
        messages.append(str(raised.value))
    strategy.barrier()
    strategy.teardown()
    return batches, messages


def test_two_ranks_read_an_endless_sampler():
    torch.manual_seed(1)
    expected = [batch.tolist() for batch in itertools.islice(DataLoader(range(50), 4, sampler=endless()), 3)]
    (first, messages), (second, _) = in_ranks(read_endless)
    assert [[*itertools.chain(*zip(*pair, strict=True))] for pair in zip(first, second, strict=True)] == expected
    assert [message.partition(", whose")[0] for message in messages] == [
        "the training loader has a sampler without a length (Endless)",
        "the evaluation loader has a sampler without a length (Endless)",
        f"the training loader has a sampler of {LENGTH} indices (Long)",
        f"the evaluation loader has a sampler of {LENGTH} indices (Long)",
    ]


def read_pairs(cluster):
    """Return the batches of a rank, and the error of a batch sampler without an end."""
    strategy = ParallelStrategy()
    strategy.receive(parts(cluster))
    strategy.setup_environment()

    def batches(count):
        loader, _ = prepare_evaluation_loader(
            DataLoader(range(10), batch_sampler=Pairs(count)), strategy, distribute=True
        )
        return [batch.tolist() for batch in loader]

    pairs = batches(5)
    with pytest.raises(RequestError) as raised:
        batches(10**10)
    strategy.barrier()
    strategy.teardown()
    return pairs, str(raised.value)


def test_batches_without_a_length_are_evaluated_up_to_their_end():
    (first, message), (second, _) = in_ranks(read_pairs)
    assert (first, second) == ([[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]])
    assert message.startswith("Pairs has no length, and has given 1000000 batches without an end")
