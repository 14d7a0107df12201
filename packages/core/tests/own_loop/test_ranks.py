"""What an own loop does in several processes."""

from __future__ import annotations

import time

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import dstrat
from dstrat import GradientSyncStrategy, OwnLoop


class Averaging(GradientSyncStrategy):
    """Gradients averaged by hand."""

    start_method = "fork"

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


@pytest.fixture
def launch():
    """Runs a function in two processes."""

    def run(function, *args, strategy=Averaging):
        return OwnLoop(dstrat.build(strategy=strategy(), accelerator=ACCELERATOR, devices=2)).launch(function, *args)

    return run


def test_no_rank_ends_before_the_last_is_done(launch, tmp_path):
    class Telling(Averaging):
        def teardown(self):
            (tmp_path / f"ended_{self.global_rank}").touch()
            super().teardown()

    def late_on_rank_1(loop):
        if loop.strategy.global_rank == 1:
            time.sleep(0.5)
            (tmp_path / "seen").write_text(str([path.name for path in tmp_path.glob("ended_*")]))

    launch(late_on_rank_1, strategy=Telling)
    assert (tmp_path / "seen").read_text() == "[]"
    assert len(list(tmp_path.glob("ended_*"))) == 2


def own_part(loop, counts):
    """What a rank reads that has so many numbers of its own, in batches of two."""
    first = 100 * loop.strategy.global_rank
    return DataLoader(range(first, first + counts[loop.strategy.global_rank]), batch_size=2)


def test_a_rank_with_more_batches_ends_its_epoch_with_the_others(launch, tmp_path):
    def read(loop):
        batches = loop.training_loader(own_part(loop, (8, 12)), distribute=False)
        loop.setup(nn.Linear(1, 1), lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        seen = []
        for x in batches:
            seen.append(x.tolist())
            loop.strategy.barrier()  # which hangs where a rank has another one
            if len(seen) == 3:
                loop.save_checkpoint(tmp_path / "saved")
        assert len(batches) == len(seen) == 4
        assert (batches.epoch, batches.batches_done) == (1, 0)
        loop.load_checkpoint(tmp_path / "saved")
        assert batches.batches_done == 3
        assert [x.tolist() for x in batches] == seen[3:]
        return seen

    assert launch(read) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_order_that_ranks_share_in_evaluation_is_that_of_the_checkpoint(launch, tmp_path):
    def read(loop, seed):
        torch.manual_seed(seed)
        loop.setup(nn.Linear(1, 1), lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        evaluated = loop.evaluation_loader(DataLoader(range(24), batch_size=4, shuffle=True))
        if seed == 1:
            loop.save_checkpoint(tmp_path / "saved")
        own = [x.tolist() for x in evaluated]
        loop.load_checkpoint(tmp_path / "saved")
        return own, [x.tolist() for x in evaluated]

    (first, same), (other, resumed) = (launch(read, seed) for seed in (1, 2))
    assert first == same == resumed != other


@pytest.mark.parametrize("begun_by", [1, 2])
def test_ranks_continue_the_shuffled_order_of_another_number(launch, tmp_path, begun_by):
    def read(loop, seed, last, path):
        """Read up to a batch of the second epoch, from the checkpoint if there is one."""
        torch.manual_seed(seed)
        loop.setup(nn.Linear(1, 1), lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        data = DataLoader(range(24), batch_size=4 // loop.strategy.world_size, shuffle=True)
        batches = loop.training_loader(data)
        if seed:
            loop.load_checkpoint(path)
        seen = []
        while (batches.epoch, batches.batches_done) < last:
            for x in batches:
                seen.append(loop.strategy.all_gather(x).flatten().sort().values.tolist())
                if (batches.epoch, batches.batches_done) == last:
                    loop.save_checkpoint(tmp_path / f"{path.name}-{last[1]}")
                    return seen
        return seen

    def run(num, *arguments):
        if num == 2:
            return launch(read, *arguments)
        return OwnLoop(dstrat.build(strategy="single_device", accelerator=ACCELERATOR, devices=1)).launch(
            read, *arguments
        )

    def read_in_three_jobs(name, *numbers):
        path = tmp_path / name
        first, second, third = numbers
        begun = run(first, 0, (1, 2), path)
        moved = run(second, 1, (1, 4), tmp_path / f"{name}-2")
        return begun + moved + run(third, 2, (3, 0), tmp_path / f"{name}-2-4")

    stayed = read_in_three_jobs("stayed", begun_by, begun_by, begun_by)
    moved = read_in_three_jobs("moved", begun_by, 3 - begun_by, begun_by)
    assert moved[:12] == stayed[:12]
    assert sorted(sample for batch in moved[12:] for sample in batch) == list(range(24))


def test_a_loader_that_is_divided_already_is_read_as_it_is(launch):
    def read(loop):
        buckets = type("Buckets", (BatchSampler,), {})
        first = loop.strategy.global_rank * 4
        own = buckets(SequentialSampler(range(4)), 2, drop_last=False)
        loader = DataLoader(range(first, first + 4), batch_sampler=own)
        trained = torch.cat(list(loop.training_loader(loader, distribute=False)))
        evaluation = loop.evaluation_loader(loader, distribute=False)
        assert not evaluation.is_divided
        assert trained.tolist() == torch.cat(list(evaluation)).tolist()
        return loop.strategy.all_gather(trained).flatten().tolist()

    assert launch(read) == list(range(8))


def test_each_rank_has_its_own_buffers_again(launch, tmp_path):
    def go_on(loop):
        net = nn.BatchNorm1d(2)
        loop.setup(net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1))
        net.running_mean.fill_(loop.strategy.global_rank)
        loop.save_checkpoint(tmp_path / "saved")
        net.running_mean.fill_(9)
        loop.load_checkpoint(tmp_path / "saved")
        return loop.strategy.all_gather(net.running_mean).tolist()

    assert launch(go_on) == [[0, 0], [1, 1]]
