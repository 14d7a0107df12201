from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest

from dstrat import Callback, ModelCheckpoint, Timer
from dstrat.errors import RequestError
from dstrat.training.module.loading import read_checkpoint


class Slow(Callback):
    """Makes each batch take some time."""

    def __init__(self, seconds=0.01, ranks=(0, 1)):
        self.seconds, self.ranks = seconds, ranks

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank in self.ranks:
            time.sleep(self.seconds)

    on_validation_batch_end = on_test_batch_end = lambda self, *_: time.sleep(self.seconds)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("01:02:03:04", 93784), ("00:00:00:30", 30), ({"hours": 1, "seconds": 1}, 3601), (timedelta(minutes=2), 120)],
)
def test_durations_are_read(given, seconds):
    assert Timer(given).duration == timedelta(seconds=seconds)
    assert Timer(given).time_remaining() == seconds


@pytest.mark.parametrize(
    "given",
    [
        "soon",
        "00:00:00:00",
        {"fortnights": 1},
        timedelta(0),
        30,
        {"hours": 1e20},
        {"days": math.nan},
        "9999999999:0:0:0",
    ],
)
def test_what_is_no_duration_is_refused(given):
    with pytest.raises(RequestError, match=r"duration=.* is not a length of time"):
        Timer(given)


def test_another_interval_or_stage_is_refused():
    with pytest.raises(RequestError, match=r"interval='batch' must be 'step' or 'epoch'"):
        Timer(interval="batch")
    with pytest.raises(RequestError, match=r"stage='fit' is not one of 'train', 'validate', 'test', 'predict'"):
        Timer().time_elapsed("fit")


def test_training_ends_when_the_time_is_up(fit, caplog):
    timer = Timer(timedelta(seconds=0.2))
    began = time.monotonic()
    trainer = fit([Slow(), timer], max_epochs=-1, limit_train_batches=6, validates=False)
    assert 0.2 <= timer.time_elapsed() <= time.monotonic() - began
    assert timer.time_remaining() == 0.0
    assert 0 < trainer.global_step < 21
    (message,) = caplog.messages
    expected = f"training ends after step {trainer.global_step}, as it has taken 0:00:00 of the 0:00:00.200000"
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_time": {"hours": 1}}, -1),
        ({"callbacks": Timer({"hours": 1})}, -1),
        ({"callbacks": Timer()}, 1000),
        ({"max_time": {"hours": 1}, "max_epochs": 3}, 3),
        ({"max_time": {"hours": 1}, "fast_dev_run": True}, 1),
    ],
)
def test_a_time_limit_takes_the_place_of_the_default_epochs(quiet_trainer, options, expected):
    assert quiet_trainer(**{"max_epochs": None, **options}).max_epochs == expected


def test_with_the_interval_epoch_it_ends_after_a_whole_epoch(fit, caplog):
    timer = Timer(timedelta(seconds=0.1), interval="epoch", verbose=False)
    trainer = fit([Slow(), timer], max_epochs=-1, limit_train_batches=6, validates=False)
    assert trainer.global_step == 6 * trainer.current_epoch
    assert 0 < trainer.current_epoch < 5
    assert not caplog.messages


def test_each_stage_has_its_time(fit, loader, line):
    timer = Timer()
    trainer = fit([Slow(0.02), timer], module=line, max_epochs=2, num_sanity_val_steps=0)
    assert 0.24 < timer.time_elapsed("validate") < timer.time_elapsed("train") - 0.08
    assert timer.time_elapsed("test") == 0.0
    assert timer.time_remaining("train") is None
    trained = timer.time_elapsed("train")
    time.sleep(0.01)
    assert timer.time_elapsed("train") == trained
    trainer.test(line, loader())
    assert timer.time_elapsed("test") > 0.1
    assert timer.time_elapsed("train") == trained


def test_a_run_that_goes_on_has_the_time_that_is_left(fit, tmp_path):
    options = {"validates": False, "enable_checkpointing": True}
    first = Timer(timedelta(seconds=60))
    fit([Slow(0.05), first, ModelCheckpoint(tmp_path)], max_epochs=2, **options)
    (path,) = tmp_path.glob("*.ckpt")
    spent = read_checkpoint(path)["callbacks"]["Timer"]["time_elapsed"]["train"]
    assert 0.2 <= spent <= first.time_elapsed()
    second, began = Timer(timedelta(seconds=60)), time.monotonic()
    fit([second, ModelCheckpoint(tmp_path / "b")], max_epochs=3, ckpt_path=path, **options)
    assert spent < second.time_elapsed() < spent + time.monotonic() - began
    third = Timer(timedelta(seconds=0.1))
    trainer = fit([third, ModelCheckpoint(tmp_path / "c")], max_epochs=9, ckpt_path=path, **options)
    assert trainer.global_step == 4


def test_a_second_fit_has_all_of_its_time(fit):
    timer = Timer()
    fit([Slow(0.05), timer], validates=False)
    began = time.monotonic()
    fit(timer, validates=False, max_epochs=1)
    assert timer.time_elapsed() < time.monotonic() - began


def test_all_ranks_end_after_the_same_step_and_the_time_comes_back(fit, averaging):
    timer = Timer(timedelta(seconds=0.3))
    options = {"validates": False, "max_epochs": -1, "limit_train_batches": 3}
    trainer = fit([Slow(ranks=(1,)), timer], devices=2, strategy=averaging(), **options)
    assert trainer.global_step > 0
    assert timer.time_elapsed() >= 0.3


def test_time_that_an_exception_ends_is_measured_too(fit):
    class Break(Callback):
        def on_train_batch_end(self, *_):
            time.sleep(0.05)
            raise RuntimeError("broken")

    timer = Timer()
    with pytest.raises(RuntimeError, match="broken"):
        fit([Break(), timer])
    assert timer.time_elapsed() >= 0.05
    assert timer.time_elapsed() == timer.time_elapsed()
