from __future__ import annotations

from datetime import timedelta

import pytest

from dstrat import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Timer, TrainModule
from dstrat.errors import ConflictError, RequestError
from dstrat.training.callbacks.defaults import complete_callbacks, with_callbacks_of

NOTHING = {"progress_bar": False, "model_summary": False, "checkpointing": False}


def classes(callbacks):
    return [type(callback).__name__ for callback in callbacks]


def test_the_users_order_is_kept_but_for_those_that_run_last_and_those_that_save():
    class Last(Callback):
        runs_last = True

    given = [ModelCheckpoint(), Last(), LambdaCallback(), EarlyStopping("loss"), Timer(), ModelCheckpoint(monitor="a")]
    completed = complete_callbacks(given, **NOTHING | {"checkpointing": True})
    assert completed == [given[2], given[4], given[1], given[3], given[0], given[5]]


def test_what_the_user_lacks_is_added():
    added = complete_callbacks(None, progress_bar=True, model_summary=True, checkpointing=True)
    assert classes(added) == ["ProgressBar", "ModelSummary", "ModelCheckpoint"]
    own = ModelCheckpoint()
    assert complete_callbacks(own, progress_bar=False, model_summary=False, checkpointing=True) == [own]


@pytest.mark.parametrize("given", ["00:02:00:00", {"hours": 2}, timedelta(hours=2)])
def test_a_limit_of_time_is_a_timer(given):
    (timer,) = complete_callbacks(None, max_time=given, **NOTHING)
    assert isinstance(timer, Timer)
    assert timer.duration == timedelta(hours=2)


def test_time_that_is_limited_twice_is_a_conflict():
    with pytest.raises(ConflictError, match=r"max_time='00:02:00:00' adds a Timer, and callbacks has one already"):
        complete_callbacks(Timer(), max_time="00:02:00:00", **NOTHING)


def test_what_is_no_length_of_time_is_refused_by_the_name_of_the_argument():
    with pytest.raises(RequestError, match=r"max_time='soon'"):
        complete_callbacks(None, max_time="soon", **NOTHING)


def test_what_is_no_callback_is_refused():
    with pytest.raises(RequestError, match=r"is not a Callback; it is a class: pass an instance, Timer\("):
        complete_callbacks([Timer], **NOTHING)


def test_a_text_is_reported_in_full():
    with pytest.raises(RequestError, match=r"callbacks='early_stopping' is not a Callback"):
        complete_callbacks("early_stopping", **NOTHING)


def test_two_with_one_state_key_are_refused():
    with pytest.raises(RequestError, match=r"two callbacks have the state_key \"EarlyStopping\(monitor='a', mode="):
        complete_callbacks([EarlyStopping("a"), EarlyStopping("a", patience=9)], **NOTHING)
    with pytest.raises(RequestError, match=r"two callbacks have the state_key 'Timer'.* override state_key in the cl"):
        complete_callbacks([Timer(), Timer()], **NOTHING)
    assert len(complete_callbacks([EarlyStopping("a"), EarlyStopping("a", state_key="b")], **NOTHING)) == 2
    assert len(complete_callbacks([EarlyStopping("a"), EarlyStopping("b")], **NOTHING)) == 2


def test_those_of_a_module_replace_others_of_their_class():
    own, others = [Timer(), ModelCheckpoint()], [Timer(), LambdaCallback()]

    class Configured(TrainModule):
        def configure_callbacks(self):
            return own

    assert with_callbacks_of(Configured(), others) == [others[1], own[0], own[1]]
    assert with_callbacks_of(TrainModule(), others) == others
