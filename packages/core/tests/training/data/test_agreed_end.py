"""Training data of unknown length, which ends in all processes at the same batch."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dstrat import SingleDeviceStrategy
from dstrat.data.equal_length import MOST_BATCHES_AHEAD, ShortestLoader
from dstrat.errors import RankFailedError


class Together(SingleDeviceStrategy):
    """A process of a job whose processes are threads."""

    def __init__(self, rank, world_size, votes, barrier):
        super().__init__(device="cpu")
        self.rank, self.votes, self._barrier = rank, votes, barrier
        self.num_votes = 0

    global_rank = property(lambda self: self.rank)

    def reduce(self, tensor, group=None, reduce_op="mean"):
        assert reduce_op == "min"
        self.num_votes += 1
        self.votes[self.rank] = tensor
        self._barrier.wait()
        agreed = torch.stack(self.votes).min()
        self._barrier.wait()
        return agreed


def read_together(*counts):
    votes, barrier = [None] * len(counts), threading.Barrier(len(counts), timeout=300)
    strategies = [Together(rank, len(counts), votes, barrier) for rank in range(len(counts))]
    found = [None] * len(counts)

    def read(rank):
        found[rank] = list(ShortestLoader(range(counts[rank]), strategies[rank]))

    threads = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(len(counts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found, strategies


@pytest.mark.parametrize("counts", [(5, 5), (5, 7, 6), (0, 3), (40, 33), (0, 0), (1, 1), (7, 7), (15, 15), (15, 16)])
def test_all_read_as_many_batches_as_the_shortest(counts):
    found, _ = read_together(*counts)
    assert found == [list(range(min(counts)))] * len(counts)


def test_the_processes_vote_once_for_several_batches():
    _, [strategy, _] = read_together(400, 400)
    assert strategy.num_votes < 400 / MOST_BATCHES_AHEAD + 6


def test_what_is_left_out_is_told_once(caplog):
    strategy = Together(0, 2, [None, torch.tensor(0)], threading.Barrier(1))
    loader = ShortestLoader([1, 2], strategy)
    assert list(loader) == list(loader) == []
    assert [record.message for record in caplog.records] == [
        "rank 0 has more training batches than another process: each epoch ends with the shortest"
    ]


class Uneven(IterableDataset):
    """A stream that divides itself by rank, unevenly."""

    def __init__(self, module, counts):
        self.module, self.counts = module, counts

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.counts[self.module.global_rank]):
            yield torch.randn(8, generator=generator), torch.zeros(1)


def test_training_on_streams_of_different_lengths_ends_with_the_shortest(quiet_trainer, make_line, averaging):
    module = make_line()
    module.train_dataloader = lambda: DataLoader(Uneven(module, [9, 5]), batch_size=1)
    trainer = quiet_trainer(strategy=averaging(), devices=2, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module)
    assert (trainer.global_step, trainer.fit_loop.batches_seen) == (10, 10)


def test_a_stream_that_is_empty_in_one_process_is_an_error(quiet_trainer, make_line, averaging):
    module = make_line()
    module.train_dataloader = lambda: DataLoader(Uneven(module, [0, 5]), batch_size=1)
    with pytest.raises(RankFailedError, match=r"the training loader .* gave no batch"):
        quiet_trainer(strategy=averaging(), devices=2, use_distributed_sampler=False).fit(module)
