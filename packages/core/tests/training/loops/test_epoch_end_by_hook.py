"""``on_train_batch_start`` that returns -1 leaves out the rest of the epoch, in all processes."""

from __future__ import annotations

import logging

import pytest

from dstrat import Callback, EarlyStopping, ModelCheckpoint


class Noting(Callback):
    """Writes after how many batches each epoch of each rank ended."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        with (self.folder / f"rank_{trainer.global_rank}").open("a") as file:
            print(trainer.fit_loop.batches_seen, file=file)

    def seen(self):
        return [path.read_text().split() for path in sorted(self.folder.glob("rank_*"))]


@pytest.fixture
def fit(quiet_trainer, make_line, loader, averaging, tmp_path):
    def run(devices, on_train_batch_start=None, callbacks=()):
        cls = type(make_line())
        if on_train_batch_start is not None:
            cls = type("Ending", (cls,), {"on_train_batch_start": on_train_batch_start})
        noting = Noting(tmp_path)
        strategy = averaging() if devices > 1 else "auto"
        trainer = quiet_trainer(strategy=strategy, devices=devices, callbacks=[noting, *callbacks], max_epochs=3)
        trainer.fit(make_line(cls), loader(4))
        return noting.seen()

    return run


@pytest.mark.parametrize("devices", [1, 2])
def test_the_next_epoch_begins_anew(fit, devices):
    def at_two(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None

    assert fit(devices, at_two) == [["2", "4", "6"]] * devices


@pytest.fixture
def log(tmp_path):
    """A file with what all ranks log."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("dstrat").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("dstrat").removeHandler(handler)
    handler.close()


def test_one_rank_ends_the_epoch_for_all_of_them_and_the_others_tell(fit, log):
    def at_two_of_rank_1(self, batch, batch_idx):
        return -1 if batch_idx == 2 and self.global_rank == 1 and self.current_epoch == 1 else None

    assert fit(2, at_two_of_rank_1) == [["6", "8", "14"]] * 2
    told = log.read_text()
    assert "epoch 1 ends before batch 2 on rank 0 too, as on_train_batch_start of another rank returned -1" in told
    assert told.count("ends before batch") == 1


def test_a_callback_can_do_it_too(fit):
    class OnRank1(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            return -1 if trainer.global_rank == 1 and batch_idx == 4 else None

    assert fit(2, callbacks=[OnRank1()]) == [["4", "8", "12"]] * 2


def test_a_hook_that_rank_0_alone_has_ends_the_epoch_for_all_of_them(fit):
    class OnlyOnRank0(Callback):
        def setup(self, trainer, module, stage):
            if trainer.global_rank == 0:
                self.on_train_batch_start = lambda trainer, module, batch, batch_idx: -1 if batch_idx == 2 else None

    assert fit(2, callbacks=[OnlyOnRank0()]) == [["2", "4", "6"]] * 2


def test_a_first_epoch_without_a_batch_needs_no_monitored_value(quiet_trainer, make_line, loader, tmp_path):
    class SkipsTheFirst(type(make_line())):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 else None

    best = ModelCheckpoint(tmp_path, monitor="loss_epoch")
    quiet_trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True).fit(make_line(SkipsTheFirst), loader(4))
    assert "epoch=1" in best.best_model_path


def test_an_epoch_that_ends_before_its_validation_needs_no_monitored_value(quiet_trainer, make_line, loader, tmp_path):
    class EndsTheFirst(type(make_line())):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.current_epoch == 0 and batch_idx == 2 else None

        def validation_step(self, batch, batch_idx):
            self.log("val", 1.0)

    best, stops = ModelCheckpoint(tmp_path, monitor="val"), EarlyStopping("val")
    trainer = quiet_trainer(max_epochs=2, callbacks=[best, stops], enable_checkpointing=True)
    trainer.fit(make_line(EndsTheFirst), loader(4), loader(4))
    assert "epoch=1" in best.best_model_path


@pytest.mark.parametrize("annotated", [True, False])
def test_ranks_communicate_for_it_only_where_a_hook_may_return_something_and_rank_0_tells_of_it(
    quiet_trainer, make_line, loader, averaging, tmp_path, log, annotated
):
    def answers(self, batch, batch_idx):
        pass

    if annotated:
        answers.__annotations__["return"] = None

    class Counting(averaging):
        decisions = 0

        def reduce_boolean_decision(self, *args, **kwargs):
            self.decisions += 1
            return super().reduce_boolean_decision(*args, **kwargs)

        def teardown(self):
            (tmp_path / f"decisions_{self.global_rank}").write_text(str(self.decisions))
            super().teardown()

    module = make_line(type("Hooked", (type(make_line()),), {"on_train_batch_start": answers}))
    quiet_trainer(strategy=Counting(), devices=2, max_epochs=1).fit(module, loader(4))
    assert (tmp_path / "decisions_1").read_text() == ("2" if annotated else "8")
    # Once before training, and once in the first step, on whether losses have weights.
    line = "on_train_batch_start of Hooked may return -1, so that the processes communicate before every batch: "
    assert log.read_text().splitlines() == ([] if annotated else [f"{line}annotate it with '-> None' if it does not"])
