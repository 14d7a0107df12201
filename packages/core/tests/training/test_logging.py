from __future__ import annotations

import re

import pytest
import torch

from dstrat import Callback, Logger
from dstrat.errors import MisuseError, RankFailedError


class Recorder(Logger):
    """Keeps what it is told to write."""

    def __init__(self):
        self.rows = []
        self.status = None

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def finalize(self, status):
        self.status = status


@pytest.fixture
def recorder():
    return Recorder()


def logging_module(make_line, log):
    class Logging(type(make_line())):
        def training_step(self, batch, batch_idx):
            log(self, batch, batch_idx)
            return self.loss(batch)

    return make_line(Logging)


def test_a_training_value_counts_per_step_and_others_per_epoch_by_default(quiet_trainer, make_line, loader):
    module = logging_module(make_line, lambda self, batch, idx: self.log("index", float(idx)))
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics["index"] == 5.0
    expected = torch.stack([module.loss(batch).detach() for batch in loader()]).mean().item()
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-6)


def test_with_both_the_names_get_suffixes(quiet_trainer, make_line, loader):
    module = logging_module(make_line, lambda self, batch, idx: self.log("index", float(idx), on_epoch=True))
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader())
    assert trainer.callback_metrics == {"index_step": 5.0, "index_epoch": 2.5, "index": 2.5}


@pytest.mark.parametrize(
    ("first", "second"), [("x", "x_step"), ("x_epoch", "x")], ids=["the ending comes first", "the ending comes last"]
)
def test_a_value_that_would_take_the_place_of_another_one_is_refused(quiet_trainer, make_line, loader, first, second):
    class Colliding(type(make_line())):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for name in (first, second):
                self.log(name, loss, on_step=name != "x_epoch", on_epoch=name != "x_step")
            return loss

    names = re.escape(f"log('{second}') and log('{first}') both give a value of the name")
    with pytest.raises(MisuseError, match=f"{names} '(x_step|x_epoch)', .*: choose another name"):
        quiet_trainer().fit(Colliding(), loader())


def test_a_mean_over_an_epoch_is_weighted_by_batch_size(quiet_trainer, make_line, loader):
    class Sizes(type(make_line())):
        def test_step(self, batch, batch_idx):
            self.log("mean", torch.tensor(float(batch_idx)))
            self.log("own_weight", float(batch_idx), batch_size=1)

    [result] = quiet_trainer().test(make_line(Sizes), loader(40))  # batches of 40 and 8
    assert result == pytest.approx({"mean": 8 / 48, "own_weight": 0.5})


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 2.5), ("sum", 15.0), ("max", 5.0), ("min", 0.0)])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_values_over_an_epoch_are_the_same_on_any_number_of_processes(
    quiet_trainer, make_line, loader, averaging, reduce_fx, expected, devices
):
    class Reduced(type(make_line())):
        def test_step(self, batch, batch_idx):
            x, _ = batch
            index = (loader_rows == x[0].cpu()).all(1).nonzero().item() // 8
            self.log("tensor", torch.tensor(float(index)), reduce_fx=reduce_fx)
            self.log("number", float(index), reduce_fx=reduce_fx)

    loader_rows = torch.cat([x for x, _ in loader()])
    strategy = averaging() if devices > 1 else "single_device"
    [result] = quiet_trainer(strategy=strategy, devices=devices).test(make_line(Reduced), loader())
    assert result == {"tensor": expected, "number": expected}


def test_values_are_written_every_so_many_steps_and_at_the_end_of_an_epoch(quiet_trainer, make_line, loader, recorder):
    module = logging_module(make_line, lambda self, batch, idx: self.log("index", float(idx), on_epoch=True))
    quiet_trainer(logger=recorder, log_every_n_steps=4).fit(module, loader())
    assert recorder.rows == [
        (4, {"epoch": 0, "index_step": 3.0}),
        (6, {"epoch": 0, "index_epoch": 2.5}),
        (8, {"epoch": 1, "index_step": 1.0}),
        (12, {"epoch": 1, "index_step": 5.0}),
        (12, {"epoch": 1, "index_epoch": 2.5}),
    ]
    assert recorder.status == "success"


def test_what_is_logged_for_others_only_is_not_written(quiet_trainer, make_line, loader, recorder):
    module = logging_module(make_line, lambda self, batch, idx: self.log("index", 1.0, logger=False, on_epoch=True))
    quiet_trainer(logger=recorder, log_every_n_steps=1).fit(module, loader())
    assert recorder.rows == []


def test_the_sanity_check_writes_nothing(quiet_trainer, line, loader, recorder):
    quiet_trainer(logger=recorder, limit_train_batches=0).fit(line, loader(), loader())
    assert recorder.rows == []


def test_a_logger_hears_of_a_failure(quiet_trainer, make_line, loader, recorder):
    def fail(self, batch, idx):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet_trainer(logger=recorder).fit(logging_module(make_line, fail), loader())
    assert recorder.status == "failed"


def test_a_value_of_a_step_is_reduced_where_that_is_asked_for(quiet_trainer, make_line, loader, averaging, tmp_path):
    path = tmp_path / "rows"

    class ToFile(Recorder):
        def log_metrics(self, metrics, step):
            path.write_text(repr(metrics["rank"]))

    module = logging_module(make_line, lambda self, b, i: self.log("rank", float(self.global_rank), sync_dist=True))
    quiet_trainer(strategy=averaging(), devices=2, logger=ToFile(), log_every_n_steps=1).fit(module, loader(4))
    assert path.read_text() == "0.5"


def test_different_names_on_different_ranks_are_an_error_that_names_them(quiet_trainer, make_line, loader, averaging):
    def log(self, batch, idx):
        self.log(f"of_rank_{self.global_rank}", 1.0, on_epoch=True)

    with pytest.raises(RankFailedError, match=r"logged 'of_rank_\d'.* and rank \d did not: values that are reduced"):
        quiet_trainer(strategy=averaging(), devices=2).fit(logging_module(make_line, log), loader(4))


def test_with_sync_dist_off_a_value_stays_that_of_the_rank(quiet_trainer, make_line, loader, averaging):
    def log(self, batch, idx):
        self.log("rank", float(self.global_rank), on_epoch=True, on_step=False, sync_dist=False)

    trainer = quiet_trainer(strategy=averaging(), devices=2)
    trainer.fit(logging_module(make_line, log), loader(4))
    assert trainer.callback_metrics == {"rank": 0.0}


def test_a_process_without_a_batch_takes_part_in_the_reduction(quiet_trainer, line, loader, averaging):
    [result] = quiet_trainer(strategy=averaging(), devices=4).test(line, loader(24))  # two batches for four processes
    [expected] = quiet_trainer().test(line, loader(24))
    assert result == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.zeros(2), {}, r"log\('x'\) got a tensor of shape \(2,\); log one number"),
        ("high", {}, r"log\('x'\) got a str; log a number"),
        (1.0, {"reduce_fx": "median"}, "reduce_fx 'median' of 'x' is not one of mean, sum, max, min"),
    ],
)
def test_what_cannot_be_logged_is_refused(quiet_trainer, make_line, loader, value, options, message):
    module = logging_module(make_line, lambda self, batch, idx: self.log("x", value, **options))
    with pytest.raises(MisuseError, match=message):
        quiet_trainer().fit(module, loader())


def test_logging_outside_a_run_does_nothing(line):
    line.log("x", 1.0)


def test_a_callback_logs_in_its_hooks(quiet_trainer, make_line, loader, recorder):
    class Logging(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log("index", float(batch_idx), on_step=True, on_epoch=True)

        def on_train_epoch_end(self, trainer, module):
            self.log_dict({"end": 3.0}, True)  # prog_bar

        def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
            self.log("validated", float(batch_idx), True)  # prog_bar, as of the module's log

    callback = Logging()
    trainer = quiet_trainer(max_epochs=1, callbacks=callback, logger=recorder, log_every_n_steps=6)
    trainer.fit(make_line(), loader(), loader())
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert {name: values[name] for name in ("index_step", "index_epoch", "end", "validated")} == {
        "index_step": 5.0,
        "index_epoch": 2.5,
        "end": 3.0,
        "validated": 2.5,
    }
    assert trainer.progress_bar_metrics == {"validated": 2.5, "end": 3.0}
    callback.log("afterwards", 1.0)  # does nothing
    assert "afterwards" not in trainer.callback_metrics
