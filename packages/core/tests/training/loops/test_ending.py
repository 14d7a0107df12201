"""When training ends: at the most, not before the least, and when something asks for it."""

from __future__ import annotations

import logging
import time

import pytest

from dstrat import Callback
from dstrat.errors import ConflictError, RequestError
from dstrat.training.loops.stopping import Votes


class StopAfter(Callback):
    """Asks to stop after a batch, on one rank or all of them."""

    def __init__(self, batches, rank=None):
        self.batches, self.rank = batches, rank

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen >= self.batches and trainer.global_rank in (self.rank, trainer.global_rank):
            trainer.should_stop = self.rank in (None, trainer.global_rank)


def test_a_callback_ends_the_training_after_its_batch(quiet_trainer, line, loader):
    trainer = quiet_trainer(callbacks=StopAfter(3))
    trainer.fit(line, loader())
    assert trainer.global_step == 3


@pytest.mark.parametrize(("least", "steps"), [({"min_epochs": 2}, 12), ({"min_steps": 8}, 8), ({"min_epochs": 1}, 6)])
def test_the_least_is_done_before_a_wish_to_stop_counts(quiet_trainer, line, loader, least, steps):
    trainer = quiet_trainer(max_epochs=5, callbacks=StopAfter(1), **least)
    trainer.fit(line, loader())
    assert trainer.global_step == steps


def test_one_rank_that_asks_stops_all_of_them_at_the_same_step(quiet_trainer, line, loader, averaging, tmp_path):
    class Noting(Callback):
        def on_train_end(self, trainer, module):
            (tmp_path / f"rank{trainer.global_rank}").write_text(str(trainer.global_step))

    trainer = quiet_trainer(
        strategy=averaging(), devices=2, max_epochs=2000, callbacks=[StopAfter(5, rank=1), Noting()]
    )
    trainer.fit(line, loader(4))
    steps = {path.read_text() for path in tmp_path.glob("rank*")}
    assert len(steps) == 1
    assert 5 <= int(steps.pop()) < 2000 * 6


def test_a_rank_leaves_the_run_when_all_have_done_their_work(quiet_trainer, line, loader, averaging, tmp_path):
    class Noting(Callback):
        def on_fit_end(self, trainer, module):
            if trainer.is_global_zero:
                time.sleep(0.2)
                (tmp_path / "done").touch()

        def teardown(self, trainer, module, stage):
            (tmp_path / f"rank{trainer.global_rank}").write_text(str((tmp_path / "done").exists()))

    quiet_trainer(strategy=averaging(), devices=2, max_epochs=1, callbacks=Noting()).fit(line, loader())
    assert (tmp_path / "rank1").read_text() == "True"


def test_ranks_with_loaders_of_different_lengths_train_on_the_smallest(
    quiet_trainer, line_class, loader, averaging, tmp_path, request
):
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("dstrat").addHandler(handler)
    request.addfinalizer(lambda: (logging.getLogger("dstrat").removeHandler(handler), handler.close()))

    class Uneven(line_class):
        def train_dataloader(self):
            return loader(4, count=16 if self.global_rank == 0 else 24)

    trainer = quiet_trainer(strategy=averaging(), devices=2, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Uneven())
    assert trainer.global_step == 4
    assert "number of batches: 4 on rank 0, 6 on rank 1; the smallest is taken" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_epochs": 3, "max_epochs": 2}, "min_epochs=3 is more than max_epochs=2"),
        ({"min_steps": 3, "max_steps": 2}, "min_steps=3 is more than max_steps=2"),
    ],
)
def test_more_at_least_than_at_most_is_an_error(quiet_trainer, options, message):
    with pytest.raises(ConflictError, match=message):
        quiet_trainer(**options)


@pytest.mark.parametrize("name", ["min_epochs", "min_steps", "reload_dataloaders_every_n_epochs"])
def test_a_negative_count_is_an_error(quiet_trainer, name):
    with pytest.raises(RequestError, match=f"{name}=-1 must be an int of at least 0"):
        quiet_trainer(**{name: -1})


class FakeJob:
    """A strategy of two processes, of which the other one votes as it is told."""

    world_size = 2
    root_device = "cpu"

    def __init__(self, other):
        self.other = other

    def from_host(self, tensor):
        return tensor

    def reduce(self, tensor, reduce_op):
        return tensor.maximum(tensor.new_tensor([*self.other, -1000]))


def test_a_vote_gives_the_largest_wish_of_all_processes():
    assert Votes(FakeJob((0, 1))).take(1, 15, 0) == (15, 1)


def test_votes_are_at_most_500_batches_apart():
    votes = Votes(FakeJob((0,)))
    votes.take(0, 0)
    assert votes.next_at == 1  # as the first step may take any time
    votes.take(10_000, 0)
    assert 10_000 < votes.next_at <= 10_500
