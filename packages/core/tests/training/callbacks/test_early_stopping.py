from __future__ import annotations

import math

import pytest

from dstrat import EarlyStopping, ModelCheckpoint
from dstrat import EarlyStoppingReason as Reason
from dstrat.errors import MisuseError, RankFailedError, RequestError
from dstrat.training.module.loading import read_checkpoint


@pytest.mark.parametrize(
    ("arguments", "scores", "epochs"),
    [
        ({"patience": 2}, [5, 4, 4, 4, 3], 4),
        ({"patience": 2}, [5, 6, 4, 6, 6, 1], 5),
        ({"patience": 2, "mode": "max"}, [5, 4, 6, 4, 4, 9], 5),
        ({"patience": 2, "min_delta": 1.0}, [5, 4.5, 4.1, 1], 3),
        ({"patience": 2, "min_delta": 1.0}, [5, 4, 4, 1], 3),
        ({"patience": 0}, [5, 5, 4], 2),
        ({"patience": 1}, [5, 5, 4], 2),
        ({"stopping_threshold": 3}, [5, 3, 2.9, 1], 3),
        ({"stopping_threshold": 3, "mode": "max"}, [1, 3, 3.1, 5], 3),
        ({"divergence_threshold": 6}, [5, 6, 6.1, 1], 3),
        ({"divergence_threshold": 2, "mode": "max"}, [5, 2, 1.9, 9], 3),
        ({}, [5, math.nan, 4], 2),
        ({}, [5, math.inf, 4], 2),
        ({"check_finite": False, "patience": 2}, [5, math.nan, 4, math.nan, math.nan, 1], 5),
    ],
)
def test_training_ends_when_it_should(fit, arguments, scores, epochs):
    callback = EarlyStopping("score", **arguments)
    trainer = fit(callback, scores, max_epochs=len(scores))
    assert trainer.current_epoch == epochs
    assert trainer.global_step == 2 * epochs
    assert callback.stopped_epoch == epochs - 1


def test_training_goes_on_while_the_value_improves(fit, caplog):
    callback = EarlyStopping("score", patience=1)
    trainer = fit(callback, [5, 4, 3])
    assert trainer.current_epoch == 3
    assert (callback.best_score, callback.wait_count, callback.stopped_epoch) == (3.0, 0, 0)
    assert callback.stopping_reason is Reason.NOT_STOPPED
    assert callback.stopping_reason_message is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("arguments", "scores", "reason", "text"),
    [
        ({"patience": 2}, [0.5, 0.25, 1, 1], Reason.PATIENCE_EXHAUSTED, "score = 1, no better than 0.25 in 2 checks"),
        ({"patience": 1}, [0.25, 1], Reason.PATIENCE_EXHAUSTED, "score = 1, no better than 0.25 in 1 check"),
        (
            {"patience": 1, "min_delta": 0.5},
            [1, 0.75],
            Reason.PATIENCE_EXHAUSTED,
            "score = 0.75, no better than 1 by more than min_delta=0.5 in 1 check",
        ),
        ({}, [1, math.nan], Reason.NON_FINITE_METRIC, "score = nan is not finite"),
        (
            {"check_finite": False, "patience": 1},
            [math.nan],
            Reason.PATIENCE_EXHAUSTED,
            "no better than no number in 1 check",
        ),
        (
            {"stopping_threshold": 0.5},
            [0.25],
            Reason.STOPPING_THRESHOLD,
            "= 0.25 is below stopping_threshold=0.5",
        ),
        (
            {"divergence_threshold": 9.0},
            [10],
            Reason.DIVERGENCE_THRESHOLD,
            "10 is above divergence_threshold=9.0",
        ),
    ],
)
def test_one_line_says_why(fit, caplog, arguments, scores, reason, text):
    callback = EarlyStopping("score", **arguments)
    fit(callback, scores, max_epochs=9)
    (message,) = caplog.messages
    assert message == f"training ends after step {2 * len(scores)}: {callback.stopping_reason_message}"
    assert message.endswith(text)
    assert callback.stopping_reason is reason


def test_improvements_are_told_where_that_is_asked_for(fit, caplog):
    fit(EarlyStopping("score", verbose=True), [5, 6, 4])
    assert caplog.messages == ["score = 5 is the best so far", "score = 4 is the best so far, was 5"]


def test_a_value_of_validation_is_checked_after_each_validation_and_ends_the_epoch(fit):
    trainer = fit(EarlyStopping("score", patience=1), [5, 4, 4], limit_train_batches=6, val_check_interval=2)
    assert trainer.global_step == 6
    trainer = fit(EarlyStopping("score", patience=1), [5, 5, 5], limit_train_batches=6, val_check_interval=2)
    assert trainer.global_step == 4


def test_a_value_that_the_module_logs_at_the_end_of_an_epoch_is_checked_in_that_epoch(fit, scripted):
    module = scripted(train_scores=[5, 4, 4])
    trainer = fit(EarlyStopping("train_score", patience=1), module=module, validates=False, max_epochs=9)
    assert trainer.current_epoch == 3


@pytest.mark.parametrize(("at_epoch_end", "steps"), [(None, 4), (False, 4), (True, 12)])
def test_where_it_is_checked_can_be_chosen(fit, at_epoch_end, steps):
    callback = EarlyStopping("score", patience=1, check_on_train_epoch_end=at_epoch_end)
    trainer = fit(callback, [5, 5, 5, 5, 5], limit_train_batches=6, val_check_interval=2, max_epochs=9)
    assert trainer.global_step == steps


def test_without_validation_nothing_is_checked_where_only_validations_are(fit, scripted, caplog):
    callback = EarlyStopping("train_score", patience=1, check_on_train_epoch_end=False)
    trainer = fit(callback, module=scripted(train_scores=[5, 5, 5]), validates=False)
    assert trainer.current_epoch == 3
    assert caplog.messages == ["EarlyStopping(monitor='train_score') had no value to check in this training"]


def test_an_epoch_that_is_broken_off_before_its_validation_misses_nothing(fit, caplog):
    trainer = fit(EarlyStopping("score"), [5], limit_train_batches=6, max_steps=3, max_epochs=9)
    assert trainer.global_step == 3
    assert caplog.messages == ["EarlyStopping(monitor='score') had no value to check in this training"]


def test_epochs_without_validation_do_not_count(fit):
    callback = EarlyStopping("score", patience=2)
    trainer = fit(callback, [5, 5, 5], check_val_every_n_epoch=2, max_epochs=9)
    assert trainer.current_epoch == 6


def test_the_sanity_check_does_not_count(fit):
    callback = EarlyStopping("score")
    fit(callback, [5, 4, 3])
    assert callback.best_score == 3.0


def test_a_value_that_nobody_logs_is_an_error_that_lists_the_known_ones(fit):
    message = r"EarlyStopping\(monitor='scores'\) waits for a value which was not logged: log it, or choose from "
    with pytest.raises(MisuseError, match=message + "loss, score$"):
        fit(EarlyStopping("scores"), [1, 1, 1])
    with pytest.raises(MisuseError, match=message + "loss, score$"):
        fit(EarlyStopping("scores", check_on_train_epoch_end=False), [1, 1, 1])


def test_a_value_that_may_be_missing_is_told_of_once(fit, caplog):
    fit(EarlyStopping("scores", strict=False), [1, 1, 1])
    assert len([message for message in caplog.messages if "waits for a value" in message]) == 1
    assert caplog.messages[-1] == "EarlyStopping(monitor='scores') had no value to check in this training"


def test_what_it_knows_is_in_checkpoints_and_a_run_goes_on_from_there(fit, tmp_path):
    options = {"enable_checkpointing": True}
    fit([ModelCheckpoint(tmp_path, "{epoch}"), EarlyStopping("score")], [5, 3, 4], **options)
    key = "EarlyStopping(monitor='score', mode='min')"
    saved = read_checkpoint(tmp_path / "epoch=2.ckpt")["callbacks"][key]
    assert saved == {
        "best_score": 3.0,
        "wait_count": 1,
        "stopped_epoch": 0,
        "stopping_reason": 0,
        "stopping_reason_message": None,
        "comes_from_validation": True,
    }
    second = EarlyStopping("score")
    options |= {"max_epochs": 9, "ckpt_path": tmp_path / "epoch=2.ckpt"}
    trainer = fit([ModelCheckpoint(tmp_path / "b"), second], [4, 4, 1], **options)
    assert trainer.current_epoch == 5
    assert (second.best_score, second.wait_count, second.stopped_epoch) == (3.0, 3, 4)


@pytest.mark.parametrize(
    ("saving", "options"),
    [({}, {"check_val_every_n_epoch": 2}), ({"save_on_train_epoch_end": False}, {})],
    ids=["rare validation", "saved after a validation"],
)
def test_a_value_that_was_judged_before_a_save_is_not_judged_again(fit, tmp_path, saving, options):
    options |= {"enable_checkpointing": True, "max_epochs": 6}
    saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=-1, **saving)
    fit([saves, EarlyStopping("score", patience=1)], [6, 5, 4, 3, 2, 1], **options)
    resumed = EarlyStopping("score", patience=1)
    scores = [5, 4] if "check_val_every_n_epoch" in options else [4, 3, 2, 1]
    trainer = fit([resumed], scores, ckpt_path=tmp_path / "epoch=1.ckpt", **options)
    assert trainer.current_epoch == 6
    assert (resumed.wait_count, resumed.stopping_reason) == (0, Reason.NOT_STOPPED)


def test_two_on_one_value_go_on_each_from_its_own_state(fit, tmp_path):
    def both():
        return [EarlyStopping("score", patience=9), EarlyStopping("score", divergence_threshold=9, state_key="bound")]

    fit([ModelCheckpoint(tmp_path, "{epoch}"), *both()], [5, 3, 4], enable_checkpointing=True)
    saved = read_checkpoint(tmp_path / "epoch=2.ckpt")["callbacks"]
    assert {"EarlyStopping(monitor='score', mode='min')", "bound"} < saved.keys()
    patient, bound = both()
    fit([patient, bound], [10], max_epochs=9, ckpt_path=tmp_path / "epoch=2.ckpt")
    assert (patient.wait_count, patient.stopping_reason) == (2, Reason.NOT_STOPPED)
    assert (bound.wait_count, bound.stopping_reason_message) == (2, "score = 10 is above divergence_threshold=9")
    assert bound.best_score.item() == 3.0


def test_state_of_older_checkpoints_is_loaded():
    callback = EarlyStopping("score")
    older = {"best_score": 3.0, "wait_count": 1, "stopped_epoch": 0, "stopping_reason": "score = 9 is not finite"}
    callback.load_state_dict(older)
    assert (callback.best_score, callback.stopping_reason) == (3.0, Reason.NOT_STOPPED)


def test_a_second_fit_begins_anew(fit):
    callback = EarlyStopping("score", patience=1)
    fit(callback, [1, 1])
    fit(callback, [5, 4, 4])
    assert (callback.best_score, callback.wait_count) == (4.0, 1)


def test_all_ranks_follow_rank_0_and_the_result_comes_back(fit, averaging, scripted):
    class Disagreeing(scripted):
        def log(self, name, value, **options):
            if name == "score":
                super().log(name, float(value) if self.global_rank == 0 else 0.0, sync_dist=False)

    callback = EarlyStopping("score", patience=1)
    trainer = fit(callback, module=Disagreeing([5, 4, 4, 1]), max_epochs=9, devices=2, strategy=averaging())
    assert trainer.current_epoch == 3
    assert (callback.best_score, callback.wait_count, callback.stopped_epoch) == (4.0, 1, 2)
    assert callback.stopping_reason is Reason.PATIENCE_EXHAUSTED
    assert callback.stopping_reason_message == "score = 4, no better than 4 in 1 check"


def test_a_value_that_only_rank_0_logs_is_checked_on_all_ranks(quiet_trainer, loader, averaging, scripted):
    class OnlyZero(scripted):
        def on_validation_epoch_end(self):
            self.log("mine", 1.0, rank_zero_only=True)

    callback = EarlyStopping("mine", patience=1)
    trainer = quiet_trainer(devices=2, strategy=averaging(), callbacks=callback, max_epochs=4)
    trainer.fit(OnlyZero(), loader(), loader())
    assert trainer.current_epoch == 2


def test_a_value_that_nobody_logs_is_an_error_on_all_ranks(fit, averaging):
    with pytest.raises(RankFailedError, match=r"waits for a value which was not logged: .* choose from loss, score"):
        fit(EarlyStopping("scores"), [1, 1, 1], devices=2, strategy=averaging())


def test_the_least_number_of_epochs_is_done_in_any_case(fit):
    trainer = fit(EarlyStopping("score", patience=1), [1, 1, 1, 1, 1], min_epochs=4, max_epochs=9)
    assert trainer.current_epoch == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "up"}, r"mode='up' must be 'min' or 'max'"),
        ({"patience": -1}, r"patience=-1 must be an int of at least 0"),
        ({"patience": 1.5}, r"patience=1.5 must be an int of at least 0"),
        ({"min_delta": -0.1}, r"min_delta=-0.1 must not be negative"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        EarlyStopping("score", **arguments)


def test_a_fast_dev_run_does_not_stop_early(fit):
    callback = EarlyStopping("score", patience=0, mode="max", stopping_threshold=1.0)
    trainer = fit(callback, [5, 4], fast_dev_run=2, limit_train_batches=None)
    assert not trainer.should_stop
    assert (callback.best_score, callback.stopping_reason) == (None, Reason.NOT_STOPPED)


def test_a_fast_dev_run_finds_a_misspelled_monitor(fit):
    with pytest.raises(MisuseError, match="monitor='scroe'"):
        fit(EarlyStopping("scroe"), [5, 4], fast_dev_run=2, limit_train_batches=None)
