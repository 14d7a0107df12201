"""A Trainer and its methods refuse what would otherwise be dropped, or done against another argument."""

from __future__ import annotations

import pytest

from dstrat import (
    Callback,
    DataModule,
    EarlyStopping,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
    Trainer,
)
from dstrat.errors import ConflictError, MisuseError, RequestError


@pytest.mark.parametrize(
    ("argument", "callback", "message"),
    [
        ("enable_checkpointing", ModelCheckpoint, "switches off every ModelCheckpoint, and callbacks has a Mine"),
        ("enable_progress_bar", ProgressBar, "switches off every ProgressBar, and callbacks has a Mine"),
    ],
)
def test_a_callback_of_a_kind_that_is_switched_off_is_a_conflict(tmp_path, argument, callback, message):
    mine = type("Mine", (callback,), {})()
    with pytest.raises(ConflictError, match=f"{argument}=False {message}"):
        Trainer(accelerator="cpu", callbacks=mine, default_root_dir=tmp_path, **{argument: False})
    with pytest.raises(ConflictError, match=f"barebones=True {message}"):
        Trainer(accelerator="cpu", callbacks=mine, default_root_dir=tmp_path, barebones=True)


def test_two_progress_bars_are_a_conflict(tmp_path):
    with pytest.raises(ConflictError, match="a TQDMProgressBar and a RichProgressBar, which would draw over"):
        Trainer(accelerator="cpu", callbacks=[TQDMProgressBar(), RichProgressBar()], default_root_dir=tmp_path)


def test_a_summary_of_the_users_is_only_in_conflict_with_barebones(tmp_path):
    summary = ModelSummary()
    assert summary in Trainer(accelerator="cpu", callbacks=summary, enable_model_summary=False).callbacks
    with pytest.raises(ConflictError, match=r"barebones=True switches off every ModelSummary, and callbacks has a "):
        Trainer(accelerator="cpu", callbacks=summary, default_root_dir=tmp_path, barebones=True)


def test_checkpointing_switched_off_leaves_a_checkpoint_of_an_exception(quiet_trainer, tmp_path):
    rescue = OnExceptionCheckpoint(tmp_path)
    assert quiet_trainer(enable_checkpointing=False, callbacks=rescue).callbacks == [rescue]


def test_barebones_is_in_conflict_with_what_waits_for_a_logged_value():
    with pytest.raises(
        ConflictError, match=r"barebones=True logs no values, and EarlyStopping\(monitor='val_loss'\) waits"
    ):
        Trainer(accelerator="cpu", barebones=True, callbacks=EarlyStopping("val_loss"))


@pytest.mark.parametrize("asked", [{"profiler": "simple"}, {"detect_anomaly": True}, {"fast_dev_run": True}])
def test_barebones_is_in_conflict_with_what_costs_time(asked):
    (name, value), *_ = asked.items()
    with pytest.raises(ConflictError, match=f"barebones=True switches off .* and {name}={value!r} was asked for"):
        Trainer(accelerator="cpu", barebones=True, **asked)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("gradient_clip_val", float("nan"), "gradient_clip_val=nan must be a "),
        ("benchmark", "x", "benchmark='x' must be True or False"),
        ("sync_batchnorm", "x", "sync_batchnorm='x' must be True or False"),
        ("inference_mode", 3, "inference_mode=3 must be True or False"),
        ("detect_anomaly", None, "detect_anomaly=None must be True or False"),
        ("use_distributed_sampler", "no", "use_distributed_sampler='no' must be True or False"),
        ("enable_progress_bar", "no", "enable_progress_bar='no' must be True or False"),
        ("barebones", 1, "barebones=1 must be True or False"),
        ("default_root_dir", 3, "default_root_dir=3 is of the type int: give a str or a Path"),
        ("default_root_dir", 0, "default_root_dir=0 is of the type int"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_name_of_its_argument(argument, value, message):
    with pytest.raises(RequestError, match=message):
        Trainer(accelerator="cpu", **{argument: value})


def test_a_hook_of_old_is_an_error_before_anything_runs(quiet_trainer, line_class, loader, tmp_path):
    """And not a method that nobody calls."""

    class Old(line_class):
        def validation_epoch_end(self, outputs):
            """Never called."""

    class OldData(DataModule):
        def on_train_dataloader(self):
            """Never called."""

    class OldCallback(Callback):
        def on_epoch_end(self, trainer, module):
            """Never called."""

    trainer = quiet_trainer()
    with pytest.raises(
        MisuseError, match=r"Old\.validation_epoch_end is not .* on_validation_epoch_end, which gets no"
    ):
        trainer.validate(Old(), loader())
    with pytest.raises(MisuseError, match=r"OldData\.on_train_dataloader is not called any .* in train_dataloader"):
        trainer.fit(line_class(), datamodule=OldData())
    with pytest.raises(MisuseError, match=r"OldCallback\.on_epoch_end is not called any more: .* on_train_epoch_end,"):
        quiet_trainer(callbacks=OldCallback())


def test_a_method_that_takes_other_arguments_than_a_hook_of_old_is_none(quiet_trainer, line_class, loader):
    class Collecting(line_class):
        def on_train_epoch_end(self):
            self.on_epoch_end([1.0])

        def on_epoch_end(self, outputs):
            self.collected = outputs

    class Old(line_class):
        def on_epoch_end(self):
            """Never called."""

    module = Collecting()
    quiet_trainer(max_epochs=1).fit(module, loader())
    assert module.collected == [1.0]
    with pytest.raises(MisuseError, match=r"Old\.on_epoch_end is not called any more"):
        quiet_trainer().fit(Old(), loader())


def test_variables_by_which_lightning_sets_arguments_are_reported(monkeypatch, caplog):
    monkeypatch.setenv("PL_TRAINER_DEVICES", "2")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("PL_TRAINER__OTHER", "3")
    Trainer(max_epochs=1, accelerator="cpu", logger=False)
    assert caplog.messages == ["the environment variable PL_TRAINER_DEVICES has no effect: pass Trainer(devices=...)"]
