from __future__ import annotations

import math
import os
import pickle
import shutil
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from dstrat import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, TorchCheckpointIO
from dstrat.errors import CheckpointError, MisuseError, RequestError
from dstrat.training.module.loading import read_checkpoint


def names(folder):
    return sorted(path.name for path in folder.glob("*") if path.name != "last")  # which points to the newest


@pytest.fixture
def fit(fit):
    """Fits with checkpoints."""
    return partial(fit, enable_checkpointing=True)


def test_by_default_the_checkpoint_of_the_last_epoch_is_kept(fit, tmp_path):
    trainer = fit(None, validates=False)
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=6.ckpt")
    assert callback.best_model_score is None
    assert names(tmp_path / "checkpoints") == ["epoch=2-step=6.ckpt"]


def test_with_a_logger_checkpoints_are_in_the_folder_of_the_run(fit, tmp_path):
    fit(ModelCheckpoint(), validates=False, logger=True)
    assert names(tmp_path / "dstrat_logs" / "version_0" / "checkpoints") == ["epoch=2-step=6.ckpt"]


@pytest.mark.parametrize(
    ("mode", "kept", "best"), [("min", [(0, 0.5), (2, 0.25)], (2, 0.25)), ("max", [(0, 0.5), (1, 0.75)], (1, 0.75))]
)
def test_the_best_k_by_a_monitored_value_are_kept(fit, tmp_path, mode, kept, best):
    callback = ModelCheckpoint(tmp_path / "c", "{epoch}-{score:.3f}", monitor="score", mode=mode, save_top_k=2)
    fit(callback, [0.5, 0.75, 0.25])
    assert names(tmp_path / "c") == [f"epoch={epoch}-score={score:.3f}.ckpt" for epoch, score in kept]
    assert callback.best_model_path == str(tmp_path / "c" / f"epoch={best[0]}-score={best[1]:.3f}.ckpt")
    assert callback.best_model_score == best[1]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_folder_that_cannot_be_made_is_an_error_before_training(fit, tmp_path, keeps):
    (tmp_path / "file").touch()
    trained = []
    callbacks = [
        ModelCheckpoint(tmp_path / "file" / "c", save_top_k=1 if keeps else 0),
        LambdaCallback(on_train_start=lambda trainer, module: trained.append(trainer)),
    ]
    if not keeps:
        fit(callbacks, validates=False)
        return
    with pytest.raises(CheckpointError, match=r"file' is not a folder: pass Trainer\(default_root_dir=\.\.\.\)"):
        fit(callbacks, validates=False)
    assert not trained


def test_a_folder_of_names_that_cannot_be_made_is_an_error_before_training(fit, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "best").touch()
    with pytest.raises(CheckpointError, match="best' is not a folder"):
        fit(ModelCheckpoint(tmp_path / "c", filename="best/{epoch}"), validates=False)


class NotRemoving(TorchCheckpointIO):
    """Removes nothing, as a run that is killed between a save and what follows."""

    def remove_checkpoint(self, path):
        pass


@pytest.mark.parametrize(("is_newer", "left"), [(False, ["0", "2", "3"]), (True, ["0", "1", "2", "3"])])
def test_what_a_killed_run_did_not_remove_goes_unless_a_later_run_wrote_it(fit, tmp_path, is_newer, left):
    fit(ModelCheckpoint(tmp_path, "{epoch}"), validates=False, plugins=[NotRemoving()])
    assert names(tmp_path) == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    written = (tmp_path / "epoch=2.ckpt").stat().st_mtime_ns + (1 if is_newer else -1) * 10**9
    os.utime(tmp_path / "epoch=1.ckpt", ns=(written, written))
    resumed = {"ckpt_path": tmp_path / "epoch=2.ckpt", "max_epochs": 4, "plugins": [TorchCheckpointIO()]}
    fit(ModelCheckpoint(tmp_path, "{epoch}"), validates=False, **resumed)
    assert names(tmp_path) == [f"epoch={name}.ckpt" for name in left]


def test_nan_is_never_the_best(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=2)
    fit(callback, [math.nan, 0.5, math.nan])
    assert callback.best_model_path == str(tmp_path / "epoch=1.ckpt")
    assert callback.best_model_score == 0.5
    fit(only_nan := ModelCheckpoint(tmp_path / "nan", monitor="score"), [math.nan] * 3)
    assert only_nan.best_model_path == ""
    assert names(tmp_path / "nan") == ["epoch=0-step=2.ckpt"]


def test_a_checkpoint_holds_the_weights_of_its_step(fit, tmp_path, scripted):
    module = scripted()
    fit(ModelCheckpoint(tmp_path), module=module, validates=False)
    saved = read_checkpoint(tmp_path / "epoch=2-step=6.ckpt")
    assert (saved["epoch"], saved["global_step"]) == (2, 6)
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)


def test_weights_alone_are_saved_where_that_is_asked_for(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path, save_weights_only=True), validates=False)
    saved = read_checkpoint(tmp_path / "epoch=2-step=6.ckpt")
    assert "state_dict" in saved
    assert "optimizer_states" not in saved


def test_all_or_none_are_kept_and_the_last_one_besides(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path / "all", save_top_k=-1, every_n_epochs=2), validates=False, max_epochs=5)
    assert names(tmp_path / "all") == ["epoch=1-step=4.ckpt", "epoch=3-step=8.ckpt"]
    callback = ModelCheckpoint(tmp_path / "none", save_top_k=0, save_last=True)
    fit(callback, validates=False)
    assert names(tmp_path / "none") == ["last.ckpt"]
    assert callback.last_model_path == str(tmp_path / "none" / "last.ckpt")
    assert read_checkpoint(callback.last_model_path)["global_step"] == 6


def test_the_last_one_is_replaced_also_when_it_is_not_among_the_best(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True)
    fit(callback, [0.1, 0.2, 0.3])
    assert read_checkpoint(tmp_path / "best.ckpt")["epoch"] == 0
    assert read_checkpoint(callback.last_model_path)["epoch"] == 2
    assert len(names(tmp_path)) == 2


def test_every_n_steps_counts_optimizer_steps(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2)
    fit(callback, validates=False, limit_train_batches=6, accumulate_grad_batches=2, max_epochs=2)
    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=1-step=6.ckpt"]


def test_a_run_that_goes_on_does_not_save_again_what_it_began_with(fit, tmp_path):
    options = {"validates": False, "limit_train_batches": 4, "accumulate_grad_batches": 2}
    fit(ModelCheckpoint(tmp_path, save_top_k=-1), max_epochs=1, **options)
    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2)
    fit(callback, max_epochs=2, ckpt_path=tmp_path / "epoch=0-step=2.ckpt", **options)
    assert names(tmp_path) == ["epoch=0-step=2.ckpt", "step=4.ckpt"]


def test_within_an_epoch_a_value_of_validation_is_saved_with_the_weights_that_it_belongs_to(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=-1, every_n_train_steps=2)
    fit(callback, [0.1, 0.2, 0.3, 0.4], limit_train_batches=6, val_check_interval=3, max_epochs=2)
    assert names(tmp_path) == [
        "step=12-score=0.4.ckpt",
        "step=3-score=0.1.ckpt",
        "step=6-score=0.2.ckpt",
        "step=9-score=0.3.ckpt",
    ]


def test_each_validation_within_an_epoch_is_ranked(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=2)
    fit(callback, [0.4, 0.1, 0.3, 0.2], limit_train_batches=6, val_check_interval=3, max_epochs=2)
    assert names(tmp_path) == ["step=12-score=0.2.ckpt", "step=6-score=0.1.ckpt"]
    assert read_checkpoint(tmp_path / "step=6-score=0.1.ckpt")["loops"]["epochs_done"] == 1


@pytest.mark.parametrize("when", [{}, {"save_on_train_epoch_end": False}])
def test_a_validation_without_a_step_since_the_last_is_not_ranked(fit, tmp_path, when):
    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=-1, **when)
    options = {"limit_train_batches": 6, "accumulate_grad_batches": 3, "val_check_interval": 2, "max_epochs": 1}
    fit(callback, [0.3, 0.2, 0.1], **options)  # after the batches 2, 4 and 6, and the steps 0, 1 and 2
    assert names(tmp_path) == ["step=1-score=0.2.ckpt", "step=2-score=0.1.ckpt"]


def test_a_validation_between_accumulated_batches_is_ranked_once(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=-1)
    options = {"limit_train_batches": 6, "accumulate_grad_batches": 3, "val_check_interval": 1, "max_epochs": 1}
    fit(callback, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1], **options)
    assert names(tmp_path) == ["step=1-score=0.4.ckpt", "step=2-score=0.1.ckpt"]


def test_a_validation_that_a_resumed_run_still_has_to_do_is_ranked(fit, tmp_path):
    class SavesBeforeValidation(Callback):
        def on_validation_start(self, trainer, module):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    def checkpoint():
        return ModelCheckpoint(tmp_path / "c", "{step}-{score}", monitor="score", save_top_k=-1)

    options = {"limit_train_batches": 4, "val_check_interval": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
    fit([checkpoint(), SavesBeforeValidation()], [0.2, 0.1], **options)
    shutil.rmtree(tmp_path / "c")
    fit(checkpoint(), [0.2, 0.1], ckpt_path=tmp_path / "saved.ckpt", **options)
    assert names(tmp_path / "c") == ["step=2-score=0.2.ckpt", "step=4-score=0.1.ckpt"]


def test_a_validation_between_two_epochs_is_ranked_too(fit, tmp_path):
    def pause(*_):
        time.sleep(0.3)

    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=-1)
    slow = LambdaCallback(on_train_batch_end=pause, on_train_epoch_end=pause)
    fit([callback, slow], [0.3, 0.2, 0.1], val_check_interval={"milliseconds": 200}, max_epochs=1)
    assert names(tmp_path) == ["step=1-score=0.3.ckpt", "step=2-score=0.1.ckpt", "step=2-score=0.2.ckpt"]


def test_weights_that_were_trained_further_are_not_ranked_by_an_older_validation(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="score", save_top_k=-1)
    fit(callback, [0.4, 0.3], limit_train_batches=5, val_check_interval=3, max_epochs=2)
    assert names(tmp_path) == ["step=3.ckpt", "step=8.ckpt"]


def test_a_value_that_validation_logs_per_step_too_is_ranked_by_the_epoch(fit, tmp_path, scripted):
    class PerStep(scripted):
        def log(self, name, value, **options):
            super().log(name, value, on_step=True, on_epoch=True, **options)

    callback = ModelCheckpoint(tmp_path, "{step}-{score:.1f}", monitor="score", save_top_k=-1)
    fit(callback, module=PerStep([0.4, 0.3]), limit_train_batches=4, val_check_interval=2, max_epochs=1)
    assert names(tmp_path) == ["step=2-score=0.4.ckpt", "step=4-score=0.3.ckpt"]


@pytest.mark.parametrize("on_epoch", [None, True])
def test_a_name_of_training_and_validation_is_ranked_by_validation(fit, tmp_path, scripted, on_epoch):
    class SameName(scripted):
        def training_step(self, batch, batch_idx):
            self.log("score", -float(self.global_step), on_epoch=on_epoch)
            return self.layer(batch[0]).square().mean()

    callback = ModelCheckpoint(tmp_path, "{epoch}-{score:.1f}", monitor="score")
    fit(callback, module=SameName([0.3, 0.1, 0.2]))
    assert names(tmp_path) == ["epoch=1-score=0.1.ckpt"]
    assert callback.best_model_score == 0.1


def test_each_validation_of_several_loaders_is_ranked(fit, quiet_trainer, loader, tmp_path, scripted):
    class Loaders(scripted):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("score", float(self.global_step), on_step=True, on_epoch=True)

    callback = ModelCheckpoint(tmp_path, "{step}", monitor="score/dataloader_idx_0", save_top_k=-1)
    trainer = quiet_trainer(callbacks=callback, limit_train_batches=4, val_check_interval=2, max_epochs=1)
    trainer.fit(Loaders(), loader(), [loader(), loader()])
    assert names(tmp_path) == ["step=2.ckpt", "step=4.ckpt"]


def test_batches_that_take_several_steps_do_not_jump_over_the_step_that_is_due(fit, tmp_path, scripted):
    class TwoSteps(scripted):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                self.optimizers().step()

    callback = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=3)
    fit(callback, module=TwoSteps(), validates=False, limit_train_batches=6, max_epochs=1)
    assert names(tmp_path) == ["step=10.ckpt", "step=12.ckpt", "step=4.ckpt", "step=6.ckpt"]


def test_epochs_without_validation_are_not_ranked_by_an_old_value(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}-{score}", monitor="score", save_top_k=-1)
    fit(callback, [0.5, 0.25], check_val_every_n_epoch=2, max_epochs=5)
    assert names(tmp_path) == ["epoch=1-score=0.5.ckpt", "epoch=3-score=0.25.ckpt"]


@pytest.mark.parametrize("resumed_at", [2, 4, 5, 7, 8, 9, 10])
@pytest.mark.parametrize(
    ("when", "options", "interval"),  # in steps, of validations
    [
        ({"every_n_train_steps": 2}, {"limit_train_batches": 6, "val_check_interval": 3, "max_epochs": 2}, 3),
        ({}, {"limit_train_batches": 3, "check_val_every_n_epoch": 2, "max_epochs": 4}, 6),
    ],
    ids=["steps", "epochs"],
)
def test_a_resumed_run_ranks_the_values_that_one_ranks_that_never_stopped(
    fit, tmp_path, when, options, interval, resumed_at
):
    def callback(name):
        return ModelCheckpoint(
            tmp_path / name, "{step}-{score}", monitor="score", save_top_k=-1, state_key="ranked", **when
        )

    scores = [0.1, 0.2, 0.3, 0.4][: 12 // interval]
    each = ModelCheckpoint(tmp_path / "each", "{step}", every_n_train_steps=1, save_top_k=-1, state_key="each")
    fit([callback("whole"), each], scores, **options)
    path = tmp_path / "each" / f"step={resumed_at}.ckpt"
    fit(callback("resumed"), scores[(resumed_at - 1) // interval :], ckpt_path=path, **options)
    # The validation after the step of the checkpoint is run again.
    later = [name for name in names(tmp_path / "whole") if int(name.split("-")[0].removeprefix("step=")) >= resumed_at]
    assert names(tmp_path / "resumed") == later


def test_values_of_the_sanity_check_rank_nothing(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}-{score}", monitor="score", save_top_k=-1, every_n_train_steps=1)
    fit(callback, [0.5], max_epochs=1, limit_train_batches=2)
    assert names(tmp_path) == ["step=2-score=0.5.ckpt"]


@pytest.mark.parametrize("when", [{}, {"every_n_train_steps": 1}], ids=["epochs", "steps"])
def test_a_monitored_value_that_nobody_logs_is_an_error_that_lists_the_known_ones(fit, tmp_path, when):
    message = r"ModelCheckpoint\(monitor='scores'\) waits for a value which was not logged: log it, or choose from "
    with pytest.raises(MisuseError, match=message + "loss, score$"):
        fit(ModelCheckpoint(tmp_path, monitor="scores", **when), [0.5, 0.5, 0.5])


def test_where_nothing_is_logged_the_error_says_so(fit, tmp_path, scripted):
    class Silent(scripted):
        def log(self, *args, **kwargs):
            pass

    with pytest.raises(MisuseError, match=r"which was not logged, nor was anything else: log it with self.log"):
        fit(ModelCheckpoint(tmp_path, monitor="loss"), module=Silent(), validates=False)


def test_files_of_another_run_are_not_touched(fit, tmp_path):
    for name in ("best.ckpt", "last.ckpt"):
        (tmp_path / name).write_text("precious")
    callback = ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True)
    fit(callback, [0.3, 0.2, 0.1])
    assert sorted(names(tmp_path)) == ["best-v1.ckpt", "best.ckpt", "last.ckpt"]
    assert (tmp_path / "best.ckpt").read_text() == (tmp_path / "last.ckpt").read_text() == "precious"
    assert callback.best_model_path == str(tmp_path / "best-v1.ckpt")


def test_a_second_fit_with_the_same_callback_begins_anew(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{score}", monitor="score")
    fit(callback, [0.1, 0.2, 0.3])
    fit(callback, [0.6, 0.5, 0.4])
    assert names(tmp_path) == ["score=0.1.ckpt", "score=0.4.ckpt"]
    assert callback.best_model_score == 0.4


def test_a_run_that_goes_on_remembers_its_best_and_removes_what_falls_out(fit, tmp_path):
    first = ModelCheckpoint(tmp_path, "{epoch}-{score}", monitor="score", save_top_k=2, save_last=True)
    fit(first, [0.3, 0.1], max_epochs=2)
    assert names(tmp_path) == ["epoch=0-score=0.3.ckpt", "epoch=1-score=0.1.ckpt"]  # of which one is the last
    second = ModelCheckpoint(tmp_path, "{epoch}-{score}", monitor="score", save_top_k=2, save_last=True)
    fit(second, [0.2, 0.4], max_epochs=4, ckpt_path="last")
    assert len(names(tmp_path)) == 3
    assert second.best_model_path == str(tmp_path / "epoch=1-score=0.1.ckpt")
    assert read_checkpoint(second.last_model_path)["epoch"] == 3


def test_a_run_that_goes_on_in_another_folder_leaves_the_first_folder_alone(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path / "a", "{score}", monitor="score"), [0.2], max_epochs=1)
    second = ModelCheckpoint(tmp_path / "b", "{score}", monitor="score")
    fit(second, [0.3, 0.1], max_epochs=3, ckpt_path=tmp_path / "a" / "score=0.2.ckpt")
    assert names(tmp_path / "a") == ["score=0.2.ckpt"]
    assert names(tmp_path / "b") == ["score=0.1.ckpt"]
    assert second.best_model_path == str(tmp_path / "b" / "score=0.1.ckpt")


def test_what_it_keeps_can_be_read_with_its_scores_as_tensors(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=2)
    assert callback.current_score is None
    fit(callback, [0.3, 0.1], max_epochs=2)
    assert callback.best_model_score.item() == 0.1
    assert callback.best_k_models == {str(tmp_path / "epoch=0.ckpt"): 0.3, str(tmp_path / "epoch=1.ckpt"): 0.1}
    assert isinstance(callback.best_k_models[callback.best_model_path], torch.Tensor)
    assert callback.kth_best_model_path == str(tmp_path / "epoch=0.ckpt")
    taken_back = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=2)
    taken_back.load_state_dict(callback.state_dict())
    assert taken_back.current_score == callback.current_score
    again = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=-1)
    fit(again, [0.7], max_epochs=3, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert (again.current_score.item(), again.kth_best_model_path) == (0.7, "")
    assert len(again.best_k_models) == 3


def test_its_arguments_can_be_read(tmp_path):
    by_steps = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    assert (by_steps.filename, by_steps.every_n_train_steps, by_steps.every_n_epochs) == ("{step}", 3, 0)
    assert (ModelCheckpoint().every_n_train_steps, ModelCheckpoint().every_n_epochs) == (0, 1)


def test_the_name_of_a_checkpoint_can_be_asked_for(tmp_path):
    callback = ModelCheckpoint(filename="{epoch}-{score:.2f}")
    values = {"epoch": 3, "score": torch.tensor(0.25)}
    assert callback.format_checkpoint_name(values) == "epoch=3-score=0.25.ckpt"
    assert callback.format_checkpoint_name(values, "{epoch:02d}", ver=2) == "epoch=03-v2.ckpt"
    callback = ModelCheckpoint(tmp_path, filename="{epoch}", auto_insert_metric_name=False)
    assert callback.format_checkpoint_name(values) == str(tmp_path / "3.ckpt")
    assert ModelCheckpoint().format_checkpoint_name({"epoch": 1, "step": 2}) == ("epoch=1-step=2.ckpt")


@pytest.mark.parametrize("async_save", [False, True])
def test_each_save_is_told_with_its_value_where_that_is_asked_for(fit, tmp_path, caplog, async_save):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", verbose=True, async_save=async_save)
    fit(callback, [0.5, 0.75, 0.25])
    assert caplog.messages == [
        f"saved '{tmp_path / 'epoch=0.ckpt'}': score = 0.5",
        f"saved '{tmp_path / 'epoch=2.ckpt'}': score = 0.25",
    ]


def test_two_that_differ_in_their_names_alone_need_a_state_key(fit, tmp_path):
    def both(folder, **options):
        return [ModelCheckpoint(folder, "a-{epoch}"), ModelCheckpoint(folder, "b-{epoch}", **options)]

    with pytest.raises(RequestError, match=r"two callbacks have the state_key .*: pass state_key='another' to one of"):
        fit(both(tmp_path))
    fit(both(tmp_path, state_key="b"), max_epochs=1)
    again = both(tmp_path, state_key="b")
    fit(again, max_epochs=2, ckpt_path=tmp_path / "b-epoch=0.ckpt")
    assert names(tmp_path) == [
        "a-epoch=1.ckpt",
        "b-epoch=0.ckpt",
        "b-epoch=1.ckpt",
    ]  # of which one is what the run began with


def test_two_of_them_work_side_by_side(fit, tmp_path):
    best = ModelCheckpoint(tmp_path, "best", monitor="score")
    often = ModelCheckpoint(tmp_path, "often-{step}", every_n_train_steps=3)
    trainer = fit([best, often], [0.1, 0.2, 0.3])
    assert names(tmp_path) == ["best.ckpt", "often-step=6.ckpt"]
    assert set(read_checkpoint(tmp_path / "best.ckpt")["callbacks"]) == {
        callback.state_key for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)
    }


def test_all_ranks_follow_rank_0(quiet_trainer, loader, averaging, tmp_path, scripted):
    class Disagreeing(scripted):
        def training_step(self, batch, batch_idx):
            self.log("mine", float(batch_idx if self.global_rank else -batch_idx), on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(tmp_path, "{step}", monitor="mine", every_n_train_steps=1, save_last=True)
    trainer = quiet_trainer(devices=2, strategy=averaging(), callbacks=callback, max_epochs=1)
    trainer.fit(Disagreeing(), loader())
    assert names(tmp_path) == ["step=3.ckpt"]
    assert callback.last_model_path == callback.best_model_path
    assert callback.best_model_path == str(tmp_path / "step=3.ckpt")
    assert callback.best_model_score == -2.0


def test_a_value_that_only_rank_0_has_hangs_nobody(quiet_trainer, loader, averaging, tmp_path, scripted):
    class OnlyZero(scripted):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 0:
                self.log("mine", 1.0 / (1 + batch_idx), on_step=True, on_epoch=False)
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(tmp_path, "{step}", monitor="mine", every_n_train_steps=1)
    quiet_trainer(devices=2, strategy=averaging(), callbacks=callback, max_epochs=1).fit(OnlyZero(), loader())
    assert names(tmp_path) == ["step=3.ckpt"]


def test_a_validation_of_rank_0_alone_is_ranked(quiet_trainer, loader, averaging, tmp_path, scripted):
    class OnlyZero(scripted):
        def on_validation_epoch_end(self):
            self.log("mine", float(self.global_step), rank_zero_only=True)

    callbacks = [ModelCheckpoint(tmp_path, "{step}", monitor="mine", save_top_k=-1), EarlyStopping("mine", patience=9)]
    trainer = quiet_trainer(devices=2, strategy=averaging(), callbacks=callbacks, val_check_interval=1, max_epochs=1)
    trainer.fit(OnlyZero(), loader(), loader())
    assert names(tmp_path) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert (callbacks[1].best_score, callbacks[1].wait_count) == (1.0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "smallest"}, r"mode='smallest' must be 'min' or 'max'"),
        ({"save_last": "newest"}, r"save_last=.newest. must be True, False or .link."),
        ({"save_top_k": -2}, r"save_top_k=-2 must be an int of at least -1"),
        ({"save_top_k": 1.5}, r"save_top_k=1.5 must be an int of at least -1"),
        ({"every_n_epochs": -1}, r"every_n_epochs=-1 must be an int of at least 0"),
        ({"every_n_train_steps": -1}, r"every_n_train_steps=-1 must be an int of at least 0"),
        ({"filename": "{epoch"}, r"filename='\{epoch' is not a template"),
        ({"enable_version_counter": False}, r"enable_version_counter=False would write over .* which is never done: "),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        ModelCheckpoint(**arguments)


def test_a_second_fit_in_other_processes_brings_back_its_own_files(fit, averaging_later, tmp_path):
    callback = ModelCheckpoint(save_last=True)
    for root, devices in (("a", 1), ("b", 2), ("c", 2)):
        strategy = averaging_later() if devices > 1 else "auto"
        fit(callback, validates=False, devices=devices, strategy=strategy, default_root_dir=tmp_path / root)
        assert callback.dirpath == tmp_path / root / "checkpoints"
        assert callback.best_model_path == str(tmp_path / root / "checkpoints" / "epoch=2-step=6.ckpt")
        assert callback.last_model_path == callback.best_model_path


def test_it_can_be_pickled_before_and_after_a_fit(fit, tmp_path):
    callback = pickle.loads(pickle.dumps(ModelCheckpoint(tmp_path, "{score}", monitor="score")))
    fit(callback, [0.1, 0.2, 0.3])
    assert pickle.loads(pickle.dumps(callback)).best_model_path == str(tmp_path / "score=0.1.ckpt")


def test_a_link_to_the_last_one_writes_no_other_file(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=2, save_last="link")
    fit(callback, validates=False, max_epochs=4, plugins=[TorchCheckpointIO()])
    assert names(tmp_path) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=3.ckpt")
    assert callback.last_model_path == str(tmp_path / "last.ckpt")
    again = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=2, save_last="link")
    fit(again, validates=False, max_epochs=5, plugins=[TorchCheckpointIO()], ckpt_path="last")
    assert names(tmp_path) == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt"]
    assert read_checkpoint(again.last_model_path)["epoch"] == 4


def test_what_a_process_of_the_same_number_left_does_not_hinder_a_link(fit, tmp_path):
    (tmp_path / f".last.ckpt.{os.getpid()}.tmp").symlink_to("gone.ckpt")
    fit(ModelCheckpoint(tmp_path, "{epoch}", save_last="link"), validates=False, plugins=[TorchCheckpointIO()])
    assert names(tmp_path) == ["epoch=2.ckpt", "last.ckpt"]
    assert (tmp_path / "last.ckpt").readlink() == Path("epoch=2.ckpt")


def test_a_link_leads_to_the_newest_that_is_kept(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=1, save_last="link")
    fit(callback, [0.1, 0.2, 0.3], plugins=[TorchCheckpointIO()])
    assert names(tmp_path) == ["epoch=0.ckpt", "last.ckpt"]
    assert read_checkpoint(tmp_path / "last.ckpt")["epoch"] == 0


def test_what_others_call_last_is_not_replaced_by_a_link(fit, tmp_path):
    (tmp_path / "last.ckpt").write_text("precious")
    callback = ModelCheckpoint(tmp_path, "{epoch}", save_last="link", async_save=True)
    fit(callback, validates=False, plugins=[TorchCheckpointIO()])
    assert (tmp_path / "last.ckpt").read_text() == "precious"
    assert read_checkpoint(tmp_path / "last-v1.ckpt")["epoch"] == 2


def test_folders_need_no_link_as_they_have_a_pointer(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last="link")
    fit(callback, [0.1, 0.3, 0.05])
    assert names(tmp_path) == ["epoch=2.ckpt"]
    assert callback.last_model_path == str(tmp_path / "epoch=2.ckpt")
    assert (tmp_path / "last").read_text() == "epoch=2.ckpt\n"


def test_a_link_alone_saves_the_last_one_where_none_is_kept(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, save_top_k=0, save_last="link")
    fit(callback, validates=False)
    assert names(tmp_path) == ["last.ckpt"]
    assert read_checkpoint(callback.last_model_path)["epoch"] == 2


def test_a_store_has_no_links_to_files(fit):
    callback = ModelCheckpoint("memory://links", save_last="link")
    with pytest.raises(MisuseError, match=r"'memory://links' is in a store, which has no links: pass save_last=True"):
        fit(callback, validates=False, plugins=[TorchCheckpointIO()])


@pytest.mark.parametrize("plugins", ["torch", None])
@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"monitor": "score", "max_steps": 1}, 1),  # before the first validation
        ({"monitor": "score", "max_steps": 3}, 3),
        ({"every_n_epochs": 2, "max_epochs": 3}, 6),
        ({"every_n_train_steps": 4, "save_top_k": 0}, 6),
        ({"every_n_train_steps": 100}, 6),
        ({}, 6),
    ],
)
def test_the_last_one_is_of_the_end_of_training(fit, tmp_path, plugins, options, last):
    run = {name: value for name, value in options.items() if name.startswith("max_")}
    options = {name: value for name, value in options.items() if name not in run}
    checkpoint = ModelCheckpoint(tmp_path, save_last=True, **options)
    fit(checkpoint, [3, 2, 1], plugins=plugins, **run)
    assert read_checkpoint(checkpoint.last_model_path)["global_step"] == last
    again = ModelCheckpoint(tmp_path, save_last=True, **options)
    before = sorted(tmp_path.iterdir())
    fit(again, plugins=plugins, ckpt_path=checkpoint.last_model_path, **run)  # of which nothing is left to train
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("start", ["its path", "last"])
@pytest.mark.parametrize("plugins", ["torch", None])
def test_the_checkpoint_from_which_a_run_goes_on_is_not_removed(fit, tmp_path, plugins, start):
    first = ModelCheckpoint(tmp_path, "{epoch}", monitor="score")
    fit(first, [3], max_epochs=1, plugins=plugins)
    path = first.best_model_path
    second = ModelCheckpoint(tmp_path, "{epoch}", monitor="score")
    fit(second, [2, 1], plugins=plugins, ckpt_path=path if start == "its path" else "last")
    assert sorted(second.best_k_models) == [str(tmp_path / "epoch=2.ckpt")]
    assert {found.name for found in tmp_path.glob("*.ckpt")} == {"epoch=0.ckpt", "epoch=2.ckpt"}


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("plugins", ["torch", None])
def test_two_jobs_that_save_into_one_folder_at_once_have_files_of_their_own(fit, tmp_path, plugins, async_save):
    def checkpoint():
        return ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_last=plugins == "torch", async_save=async_save)

    class Other(Callback):
        """Runs the other job while this one is within its first save."""

        callback = None

        def on_save_checkpoint(self, trainer, module, checkpoint_):
            if self.callback is None:
                self.callback = checkpoint()
                fit(self.callback, max_epochs=2, plugins=plugins)

    mine, other = checkpoint(), Other()
    fit([mine, other], max_epochs=3, plugins=plugins)
    names = [[Path(path).name for path in callback.best_k_models] for callback in (mine, other.callback)]
    assert names == [["epoch=0.ckpt", "epoch=1-v1.ckpt", "epoch=2.ckpt"], ["epoch=0-v1.ckpt", "epoch=1.ckpt"]]
    steps = {path.name: read_checkpoint(path)["global_step"] for path in tmp_path.glob("*.ckpt")}
    lasts = {"last.ckpt": 6, "last-v1.ckpt": 4} if plugins == "torch" else {}
    assert (
        steps
        == {"epoch=0.ckpt": 2, "epoch=1-v1.ckpt": 4, "epoch=2.ckpt": 6, "epoch=0-v1.ckpt": 2, "epoch=1.ckpt": 4} | lasts
    )
    assert not list(tmp_path.glob(".dstrat-*"))
