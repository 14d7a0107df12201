from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from pathlib import Path

import pytest

from dstrat import (
    Callback,
    CheckpointIO,
    CSVLogger,
    ModelCheckpoint,
    SimpleProfiler,
    SingleDeviceStrategy,
    TensorBoardLogger,
    TorchCheckpointIO,
    TorchPredictionWriter,
    read_predictions,
)
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.portable.reader import read_manifest
from dstrat.errors import CheckpointError, MisuseError
from dstrat.training.loggers.defaults import SilentLogger
from dstrat.training.module.loading import read_checkpoint

IOS = [PortableCheckpointIO, TorchCheckpointIO]


@pytest.fixture
def fit(quiet_trainer, make_line, loader):
    """Fits for some epochs."""

    def fit_(max_epochs, callback=None, ckpt_path=None, resume=None, module=None, **options):
        options = {"enable_checkpointing": True} | options
        trainer = quiet_trainer(max_epochs=max_epochs, callbacks=callback, **options)
        trainer.fit(module or make_line(), loader(), loader(), ckpt_path=ckpt_path, resume=resume)
        return trainer

    return fit_


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("where", ["a folder of its own", "a logger's folder", "the root"])
def test_auto_starts_anew_and_then_goes_on_from_the_newest(fit, tmp_path, caplog, io, where):
    def run(max_epochs):
        caplog.clear()
        callback = ModelCheckpoint(tmp_path / "mine") if where == "a folder of its own" else None
        options = {"logger": where == "a logger's folder", "plugins": [io()]}
        trainer = fit(max_epochs, callback, resume="auto", **options)
        messages = [message for message in caplog.messages if "resume" in message]
        return trainer, messages

    trainer, (message,) = run(1)
    assert message.startswith("resume='auto': training starts anew, as there is no complete checkpoint in ")
    saved = trainer.checkpoint_callback.best_model_path
    trainer, (message,) = run(3)
    assert message == f"resume='auto': training resumes from {saved}"
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


def test_messages_show_paths_as_one_types_them(fit, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    fit(1, ModelCheckpoint(tmp_path / "mine"), resume="auto")
    fit(2, ModelCheckpoint(tmp_path / "mine"), resume="auto")
    first, second = (message for message in caplog.messages if "resume" in message)
    assert first.startswith("resume='auto': training starts anew, as there is no complete checkpoint in 'mine'")
    assert second == "resume='auto': training resumes from mine/epoch=0-step=6.ckpt"


class Dated(CSVLogger):
    """A logger that names its versions itself."""

    def __init__(self, save_dir):
        super().__init__(save_dir, version=None)

    @property
    def log_dir(self):
        return str(self.root_dir / "dated" / f"{id(self):x}")  # as in programs for Lightning


LOGGERS = {
    "csv": CSVLogger,
    "tensorboard": lambda folder: TensorBoardLogger(folder, name="n"),
    "without a name": lambda folder: CSVLogger(folder, name=""),
    "a fixed version": lambda folder: CSVLogger(folder, version="mine"),
    "a version of its own": Dated,
    "two": lambda folder: [SilentLogger(), CSVLogger(folder)],
}


@pytest.mark.parametrize(
    ("logger", "rank_0_elsewhere"),
    [
        *((logger, False) for logger in LOGGERS),
        *(
            pytest.param(logger, True, marks=[pytest.mark.variant] * (logger not in ("csv", "two")))
            for logger in LOGGERS
        ),
    ],
)
def test_every_search_finds_the_checkpoints_in_a_loggers_own_folder(
    fit, make_line, loader, averaging, quiet_trainer, tmp_path, caplog, logger, rank_0_elsewhere
):
    def options():
        processes = {"strategy": averaging(), "devices": 2} if rank_0_elsewhere else {}
        return {"logger": LOGGERS[logger](tmp_path / "logs"), "default_root_dir": tmp_path / "root", **processes}

    saved = fit(1, **options()).checkpoint_callback.best_model_path
    assert saved.startswith(str(tmp_path / "logs"))
    assert fit(2, resume="auto", **options()).ckpt_path == saved
    assert "starts anew" not in caplog.text
    newest = fit(3, ckpt_path="last", **options()).ckpt_path
    assert Path(newest).parent.is_relative_to(tmp_path / "logs")
    assert newest != saved
    for path in ("last", "best"):  # a Trainer that has not trained
        trainer = quiet_trainer(enable_checkpointing=True, **options())
        trainer.test(make_line(), loader(), ckpt_path=path)
        assert Path(trainer.ckpt_path).name.startswith("epoch=2")


def test_the_newest_of_all_callbacks_is_found_also_beside_a_chosen_folder(fit, tmp_path):
    def run(max_epochs, **kwargs):
        best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", mode="max")  # the first one, as the loss falls
        latest = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        return fit(max_epochs, [best, latest], logger=CSVLogger(tmp_path / "logs"), **kwargs)

    run(2)
    assert run(2, resume="auto").ckpt_path.endswith("logs/dstrat_logs/version_0/checkpoints/epoch=1-step=12.ckpt")


def test_a_folder_within_the_loggers_is_found_in_earlier_runs(fit, tmp_path):
    def run(max_epochs, **kwargs):
        logger = CSVLogger(tmp_path / "logs")
        return fit(max_epochs, ModelCheckpoint(logger.log_dir / "[kept]" / "1", "{epoch}"), logger=logger, **kwargs)

    run(1)
    assert run(2, resume="auto").ckpt_path.endswith("version_0/[kept]/1/epoch=0.ckpt")


@pytest.mark.parametrize("by", ["version", "dirpath"])
def test_auto_takes_no_checkpoint_of_another_chosen_version_or_folder(fit, tmp_path, caplog, by):
    for name in ("a", "b"):
        callback = ModelCheckpoint(tmp_path / name / "checkpoints") if by == "dirpath" else None
        trainer = fit(1, callback, logger=CSVLogger(tmp_path, version=name), resume="auto")
        assert trainer.ckpt_path is None
        assert f"there is no complete checkpoint in '{trainer.checkpoint_callback.dirpath}'" in caplog.text


@pytest.mark.parametrize("what", ["manifest", "folder"])
def test_auto_does_not_start_anew_where_the_disk_fails(fit, tmp_path, monkeypatch, what):
    fit(1, ModelCheckpoint(tmp_path, "{epoch}"))

    def refuse(function):
        refused = tmp_path / "epoch=0.ckpt" / "manifest.json" if what == "manifest" else tmp_path / "epoch=0.ckpt"

        def call(path, *args, **kwargs):
            if str(path) == str(refused):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "open", refuse(os.open))
    monkeypatch.setattr(Path, "iterdir", refuse(Path.iterdir))
    with pytest.raises(CheckpointError, match=r"^no checkpoint could be looked for: .*0\.ckpt.*"):
        fit(2, ModelCheckpoint(tmp_path, "{epoch}"), resume="auto")


def test_auto_takes_no_checkpoint_that_is_incomplete(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(2, callback)
    (tmp_path / "epoch=1.ckpt" / "tensors.json").unlink()
    shutil.copytree(tmp_path / "epoch=1.ckpt", tmp_path / ".dstrat-0123.tmp")
    seen = []

    class See(Callback):
        def on_train_start(self, trainer, module):
            seen.append(trainer.global_step)

    fit(3, [ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), See()], resume="auto")
    assert seen == [6]


def test_ranks_go_on_from_the_same_one(fit, averaging, tmp_path):
    options = {"strategy": averaging, "devices": 2}
    for max_epochs in (1, 2):
        trainer = fit(max_epochs, ModelCheckpoint(tmp_path), resume="auto", **(options | {"strategy": averaging()}))
    assert trainer.global_step == 6
    assert fit(3, ModelCheckpoint(tmp_path), ckpt_path="last").global_step == 12  # on one device again


@pytest.mark.parametrize("io", IOS)
def test_best_and_last_are_those_of_the_callback(fit, make_line, loader, tmp_path, io):
    def callback():
        return ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", mode="max", save_last=True)

    trainer = fit(3, callback(), plugins=[io()])
    best, last = trainer.checkpoint_callback.best_model_path, trainer.checkpoint_callback.last_model_path
    assert best.endswith("epoch=0.ckpt")  # as the loss falls
    results = {path: trainer.validate(make_line(), loader(), ckpt_path=path) for path in ("last", "best", last, best)}
    assert results["best"] == results[best] != results["last"] == results[last]
    assert trainer.checkpoint_callback.last_model_path == last  # also after an older one was evaluated
    fresh = fit(3, callback(), ckpt_path="best", plugins=[io()])  # the newest one knows which is the best
    assert fresh.global_step == 18
    assert read_checkpoint(best)["epoch"] == 0


def test_a_best_checkpoint_that_is_gone_is_answered_with_those_that_exist(fit, tmp_path):
    def callback():
        return ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", mode="max", save_last=True)

    shutil.rmtree(fit(2, callback()).checkpoint_callback.best_model_path)
    message = r"names no best one that still exists: give the path of a checkpoint, such as last.ckpt$"
    with pytest.raises(CheckpointError, match=message):
        fit(3, callback(), ckpt_path="best")


@pytest.mark.parametrize(("stage", "processes"), [("validate", 1), ("test", 1), ("predict", 1), ("test", 2)])
def test_evaluation_without_a_module_uses_the_best_checkpoint(
    fit, make_line, line_class, loader, averaging, tmp_path, caplog, stage, processes
):
    class Predicting(line_class):
        def predict_step(self, batch, batch_idx):
            return float(self.layer(batch[0]).sum())

    worst = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", mode="max")  # as the loss falls
    options = {"devices": 2, "strategy": averaging()} if processes == 2 else {}
    trainer = fit(3, worst, module=make_line(Predicting), **options)

    def evaluated(module=None, **kwargs):
        return getattr(trainer, stage)(module, loader(16), **kwargs)

    as_it_is = evaluated(trainer.module)
    caplog.clear()
    by_default = evaluated()
    best = worst.best_model_path
    if processes == 1:
        logged = f"{stage} without a module uses the best checkpoint of the last fit, {best} (val_loss = "
        assert logged in caplog.text
        assert "pass the module to use its weights as they are" in caplog.text
    assert by_default == evaluated(make_line(Predicting), ckpt_path=best) != as_it_is


def test_the_best_checkpoint_is_that_of_the_first_of_several_callbacks(fit, loader, tmp_path, caplog):
    callbacks = [ModelCheckpoint(tmp_path / mode, "{epoch}", monitor="val_loss", mode=mode) for mode in ("max", "min")]
    trainer = fit(2, callbacks)
    for ckpt_path in (None, "best"):
        caplog.clear()
        trainer.test(dataloaders=loader(), ckpt_path=ckpt_path)
        assert trainer.ckpt_path == str(tmp_path / "max" / "epoch=0.ckpt")
        assert "of the first of 2 ModelCheckpoint callbacks" in caplog.text


@pytest.mark.parametrize(
    ("callback", "options", "why"),
    [
        (None, {"enable_checkpointing": False}, "there is no ModelCheckpoint"),
        (ModelCheckpoint(save_top_k=0), {}, r"ModelCheckpoint\(save_top_k=0\) keeps none"),
        (ModelCheckpoint(every_n_epochs=5), {}, "none was saved"),
        (None, {"fast_dev_run": True}, "fast_dev_run=1 saves none"),
    ],
)
def test_evaluation_without_a_module_needs_a_checkpoint(fit, loader, callback, options, why):
    trainer = fit(1, callback, **options)
    with pytest.raises(CheckpointError, match=f"^test without a module uses the best .* and {why}: pass the module to"):
        trainer.test(dataloaders=loader())
    trainer.test(trainer.module, loader())


def test_the_log_says_which_checkpoint_best_and_last_are(fit, make_line, loader, tmp_path, caplog):
    trainer = fit(1, ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss"))
    trainer.predict(make_line(), loader(), ckpt_path="best")
    fit(2, ModelCheckpoint(tmp_path, "{epoch}"), ckpt_path="last")
    path = tmp_path / "epoch=0.ckpt"
    assert f"ckpt_path='best': predict uses the weights of {path} (val_loss = " in caplog.text
    assert f"ckpt_path='last': training resumes from {path}" in caplog.text


def test_what_is_not_there_is_an_error_that_says_where_it_was_looked_for(fit, tmp_path):
    for path in ("last", "best"):
        with pytest.raises(CheckpointError, match=rf"ckpt_path='{path}', and there is no complete checkpoint in '"):
            fit(1, ModelCheckpoint(tmp_path / "empty"), ckpt_path=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": "always"}, "resume='always' is not known: pass 'auto'"),
        ({"resume": "auto", "ckpt_path": "last"}, "resume='auto' looks for a checkpoint, and ckpt_path='last' is one"),
    ],
)
def test_a_wrong_wish_is_refused(fit, arguments, message):
    with pytest.raises(MisuseError, match=message):
        fit(1, **arguments)


def test_the_pointer_beside_the_checkpoints_can_be_loaded(fit, tmp_path, line_class):
    fit(2, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    assert read_checkpoint(tmp_path / "last")["epoch"] == 1
    assert fit(3, ckpt_path=tmp_path / "last").global_step == 18
    line_class.load_from_checkpoint(tmp_path / "last")


def test_last_ckpt_is_the_last_checkpoint_whatever_its_name(fit, tmp_path):
    fit(2, ModelCheckpoint(tmp_path, "{epoch}", save_last=True))
    assert not (tmp_path / "last.ckpt").exists()
    assert fit(3, ckpt_path=tmp_path / "last.ckpt").global_step == 18
    (tmp_path / "last").unlink()
    with pytest.raises(CheckpointError, match=r"last\.ckpt' does not exist: check the path"):
        fit(3, ckpt_path=tmp_path / "last.ckpt")


class MyDevice(SingleDeviceStrategy):
    """A strategy without an alias."""


@pytest.mark.parametrize(
    ("asked", "alias"),
    [("auto", "single_device"), (SingleDeviceStrategy, "single_device"), (MyDevice, "MyDevice")],
)
def test_a_checkpoint_names_the_strategy_by_its_alias(fit, tmp_path, asked, alias):
    fit(1, ModelCheckpoint(tmp_path, "{epoch}"), strategy=asked if asked == "auto" else asked(), devices=1)
    assert read_manifest(tmp_path / "epoch=0.ckpt").strategy == alias


class Own(CheckpointIO):
    """An io of the user's own, which takes paths as they are."""

    def save_checkpoint(self, checkpoint, path):
        Path(path).touch()

    def load_checkpoint(self, path):
        raise AssertionError(path)


def test_a_tilde_is_the_home_folder_in_every_path(
    fit, make_line, line_class, quiet_trainer, loader, tmp_path, monkeypatch
):
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir(), work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(home))
    trainer = fit(1, ModelCheckpoint("~/kept", "{epoch}"), default_root_dir="~/root", logger=CSVLogger("~/logs"))
    trainer.save_checkpoint("~/end")
    assert fit(2, None, ckpt_path="~/kept/epoch=0.ckpt", default_root_dir=Path("~/root")).global_step == 12
    line_class.load_from_checkpoint("~/end")
    writer = TorchPredictionWriter("~/predictions")
    quiet_trainer(callbacks=writer, profiler=SimpleProfiler("~/profiles", "times")).predict(
        make_line(), loader(), return_predictions=False
    )
    assert len(read_predictions("~/predictions")) == 6

    class Saving(line_class):
        def on_train_end(self):
            self.trainer.save_checkpoint("~/own")

    quiet_trainer(plugins=Own(), max_steps=1).fit(Saving(), loader())
    names = {"kept", "root", "logs", "end", "last", "predictions", "profiles", "own"}
    assert {path.name for path in home.iterdir()} == names
    assert not list(work.iterdir())


def set_back(path, hours=1):
    """Let a checkpoint look as if it was saved at a time when the clock was wrong."""
    wrong = time.time_ns() - hours * 3600 * 10**9
    if path.is_dir():
        manifest = dataclasses.replace(read_manifest(path), created_ns=wrong)
        (path / "manifest.json").write_bytes(manifest.to_bytes())
    else:
        os.utime(path, ns=(wrong, wrong))


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("asked", [{"ckpt_path": "last"}, {"resume": "auto"}])
@pytest.mark.parametrize("has_pointer", [True, False])
def test_the_newest_is_that_of_the_latest_step_though_the_clock_was_set_back(fit, tmp_path, io, asked, has_pointer):
    fit(3, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1), plugins=io())
    for hours, epoch in enumerate((1, 2), 1):
        set_back(tmp_path / f"epoch={epoch}.ckpt", hours)
    if not has_pointer:
        (tmp_path / "last").unlink(missing_ok=True)
    trainer = fit(3, ModelCheckpoint(tmp_path, "{epoch}"), plugins=io(), **asked)  # which has nothing left to do
    assert trainer.ckpt_path == str(tmp_path / "epoch=2.ckpt")


def test_the_newest_of_several_folders_is_that_of_the_latest_step(fit, tmp_path):
    for max_epochs in (1, 2):
        fit(max_epochs, resume="auto", logger=CSVLogger(tmp_path, "logs"))
    (second,) = tmp_path.glob("logs/version_1/checkpoints/*.ckpt")
    set_back(second)
    assert fit(2, resume="auto").ckpt_path == str(second)


def test_of_two_runs_in_a_folder_the_pointer_knows_which_was_the_last(fit, tmp_path):
    fit(3, ModelCheckpoint(tmp_path, "first-{epoch}"))
    fit(1, ModelCheckpoint(tmp_path, "second-{epoch}"))
    set_back(tmp_path / "second-epoch=0.ckpt", -1)
    assert fit(2, ModelCheckpoint(tmp_path), resume="auto").ckpt_path == str(tmp_path / "second-epoch=0.ckpt")


def test_a_checkpoint_that_a_crash_came_after_is_newer_than_what_the_pointer_names(fit, tmp_path):
    fit(2, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    (tmp_path / "last").write_text("epoch=0.ckpt\n")
    assert fit(2, ModelCheckpoint(tmp_path), ckpt_path="last").ckpt_path == str(tmp_path / "epoch=1.ckpt")
