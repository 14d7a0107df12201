from __future__ import annotations

import time
from datetime import timedelta

import pytest

from dstrat import LambdaCallback, ModelCheckpoint
from dstrat.errors import ConflictError, RequestError


def names(folder):
    return sorted(path.name for path in folder.glob("*.ckpt"))


def pause(*_):
    time.sleep(0.1)


def test_by_time_it_saves_at_the_end_of_a_step_and_not_of_epochs(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, train_time_interval={"milliseconds": 500})
    began = time.monotonic()
    fit([callback, LambdaCallback(on_train_batch_end=pause)], validates=False, limit_train_batches=6, max_epochs=2)
    assert 1 <= len(names(tmp_path)) <= (time.monotonic() - began) / 0.5


def test_several_processes_save_by_the_clock_of_rank_0(fit, averaging, tmp_path):
    def pause_on_rank_1(trainer, *_):
        if trainer.global_rank == 1:
            time.sleep(0.3)

    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, train_time_interval="00:00:01")
    slow = LambdaCallback(on_train_batch_end=pause_on_rank_1)
    began = time.monotonic()
    fit([callback, slow], validates=False, devices=2, strategy=averaging(), limit_train_batches=3, max_epochs=4)
    steps = [int(name.removesuffix(".ckpt").removeprefix("step=")) for name in names(tmp_path)]
    assert 2 <= len(steps) <= time.monotonic() - began, steps


def test_nothing_is_saved_before_the_time_is_up(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path, train_time_interval=timedelta(hours=1)), validates=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("at_end", "steps"), [(True, [4, 8]), (False, [2, 4, 6, 8]), (None, [4, 8])])
def test_epochs_end_with_their_training_or_with_each_validation(fit, tmp_path, at_end, steps):
    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, save_on_train_epoch_end=at_end)
    fit(callback, [0.1] * 4, limit_train_batches=4, val_check_interval=2, max_epochs=2)
    assert names(tmp_path) == [f"step={step}.ckpt" for step in steps]


def test_a_monitored_value_of_training_is_found_at_the_end_of_epochs(fit, tmp_path, scripted):
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="train_score", save_on_train_epoch_end=True)
    fit(callback, module=scripted([0.1] * 3, train_scores=[0.3, 0.1, 0.2]))
    assert names(tmp_path) == ["step=4.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"every_n_epochs": 2, "every_n_train_steps": 5},
            "every_n_epochs=2 and every_n_train_steps=5 each determine when to save",
        ),
        (
            {"every_n_train_steps": 5, "save_on_train_epoch_end": True},
            "save_on_train_epoch_end=True is about epochs, and every_n_train_steps=5 saves between them",
        ),
    ],
)
def test_what_excludes_each_other_is_refused(arguments, message):
    with pytest.raises(ConflictError, match=message):
        ModelCheckpoint(**arguments)


def test_saves_between_epochs_need_none_at_their_end(fit, tmp_path):
    callback = ModelCheckpoint(
        tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3, save_on_train_epoch_end=False, save_last=False
    )
    fit(callback, [0.1] * 4, limit_train_batches=4, max_epochs=2)
    assert names(tmp_path) == ["step=3.ckpt", "step=6.ckpt"]


def test_a_time_that_is_none_is_refused():
    with pytest.raises(RequestError, match="train_time_interval='soon' is not a length of time"):
        ModelCheckpoint(train_time_interval="soon")


@pytest.mark.parametrize(
    ("times", "steps"),
    [
        ({"every_n_epochs": 0}, []),
        ({"every_n_train_steps": 0}, []),
        ({"every_n_train_steps": 0, "every_n_epochs": 0}, []),
        ({"every_n_train_steps": 0, "every_n_epochs": 1}, [4, 8]),
        ({"every_n_train_steps": 3, "every_n_epochs": 0}, [3, 6]),
    ],
)
def test_a_number_of_0_saves_never(fit, tmp_path, times, steps):
    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, save_last=False, **times)
    fit(callback, validates=False, limit_train_batches=4, max_epochs=2)
    assert names(tmp_path) == [f"step={step}.ckpt" for step in steps]
