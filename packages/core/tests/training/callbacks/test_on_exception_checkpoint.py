from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat import Callback, EMAWeightAveraging, OnExceptionCheckpoint
from dstrat.errors import CheckpointError, RankFailedError, RequestError
from dstrat.training.module.loading import read_checkpoint

SCRIPT = """
import logging, os, signal, sys, time
from torch.utils.data import DataLoader
from dstrat import Callback, OnExceptionCheckpoint, Trainer
sys.path.insert(0, {folder!r})
from conftest import ACCELERATOR, Averaging, Line, numbers

class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 20:
            os.write(1, b"running\\n")
        time.sleep(0.005)

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=int(sys.argv[1]), max_epochs=-1,
        strategy=Averaging() if sys.argv[1] != "1" else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[Tell(), OnExceptionCheckpoint({target!r})],
    )
    trainer.fit(Line(), DataLoader(numbers(), batch_size=4))
"""


class Break(Callback):
    """Raises an exception after a step, in one rank."""

    def __init__(self, error=None, *, rank=0, step=3):
        self.error, self.rank, self.step = error or RuntimeError("broken"), rank, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            raise self.error


def names(folder):
    return sorted(path.name for path in folder.glob("*") if path.name != "last")  # which points to the newest


def test_an_exception_in_training_leaves_a_checkpoint_and_goes_on_itself(fit, make_line, tmp_path, caplog):
    module, callback = make_line(), OnExceptionCheckpoint(tmp_path / "c")
    with pytest.raises(RuntimeError, match="broken"):
        fit([callback, Break()], module=module)
    saved = read_checkpoint(tmp_path / "c" / "on_exception.ckpt")
    assert saved["global_step"] == 3
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)
    assert callback.ckpt_path == str(tmp_path / "c" / "on_exception.ckpt")
    assert caplog.messages == [f"RuntimeError after step 3: saved {callback.ckpt_path}"]


def test_training_can_go_on_from_it(fit, make_line, tmp_path):
    with pytest.raises(RuntimeError, match="broken"):
        fit([OnExceptionCheckpoint(tmp_path), Break(step=4)], module=make_line())
    trainer = fit(None, module=make_line(), ckpt_path=tmp_path / "on_exception.ckpt")
    assert trainer.current_epoch == 3


def test_a_name_that_is_taken_is_not_written_over(fit, tmp_path):
    callback = OnExceptionCheckpoint(tmp_path, "rescued")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            fit([callback, Break()])
    assert names(tmp_path) == ["rescued-v1.ckpt", "rescued.ckpt"]
    assert callback.ckpt_path == str(tmp_path / "rescued-v1.ckpt")


def test_nothing_is_saved_of_what_has_not_begun_or_is_no_training(fit, tmp_path, loader):
    class Early(Callback):
        def on_fit_start(self, trainer, module):
            raise RuntimeError("early")

        on_validation_start = on_fit_start

    with pytest.raises(RuntimeError, match="early"):
        fit([OnExceptionCheckpoint(tmp_path), Early()])
    trainer = fit(OnExceptionCheckpoint(tmp_path), validates=False)
    trainer.callbacks.append(Early())
    with pytest.raises(RuntimeError, match="early"):
        trainer.validate(trainer.module, loader())
    assert names(tmp_path) == []


def test_a_second_interruption_does_not_wait_for_a_checkpoint(fit, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit([OnExceptionCheckpoint(tmp_path), Break(KeyboardInterrupt())])
    assert names(tmp_path) == []


def test_what_cannot_be_saved_does_not_hide_the_exception(fit, tmp_path, caplog):
    class Occupy(Callback):
        def on_train_batch_end(self, *_):
            (tmp_path / "name").write_text("")  # it could be a folder when the fit began

    with pytest.raises(RuntimeError, match="broken"):
        fit([OnExceptionCheckpoint(tmp_path / "name"), Occupy(), Break()])
    (message,) = caplog.messages
    assert message.startswith("OnExceptionCheckpoint could not save after RuntimeError: could not create checkpoint ")


def test_weights_that_validation_had_exchanged_are_back(fit, make_line, tmp_path):
    class BreakValidation(Callback):
        def on_validation_batch_start(self, trainer, module, *_):
            if not trainer.sanity_checking:
                raise RuntimeError("broken")

    module = make_line()
    with pytest.raises(RuntimeError, match="broken"):
        fit([OnExceptionCheckpoint(tmp_path), EMAWeightAveraging(decay=0.5), BreakValidation()], module=module)
    saved = read_checkpoint(tmp_path / "on_exception.ckpt")
    assert torch.equal(saved["current_model_state"]["layer.weight"], module.layer.weight)
    assert not torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_fails_saves_alone(fit, averaging, tmp_path, rank):
    callbacks = [OnExceptionCheckpoint(tmp_path), Break(ValueError("broken"), rank=rank)]
    with pytest.raises(RankFailedError, match=rf"rank {rank}(.|\n)*broken"):
        fit(callbacks, validates=False, devices=2, strategy=averaging())
    assert names(tmp_path) == ["on_exception.ckpt"]
    assert read_checkpoint(tmp_path / "on_exception.ckpt")["global_step"] == 3


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_it_has_the_buffers_too_whichever_rank_saves(fit, averaging, make_line, line_class, tmp_path, rank, averages):
    class Normed(line_class):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    others = [EMAWeightAveraging(decay=0.5)] if averages else []
    callbacks = [OnExceptionCheckpoint(tmp_path), *others, Break(rank=rank)]
    options = {"validates": False, "devices": 2}
    with pytest.raises(RankFailedError, match="broken"):
        fit(callbacks, module=make_line(Normed), strategy=averaging(), **options)
    saved = read_checkpoint(tmp_path / "on_exception.ckpt")
    states = [saved[key] for key in ("state_dict", "current_model_state") if key in saved]
    assert len(states) == 1 + averages
    assert [state["layer.0.num_batches_tracked"] for state in states] == [3] * len(states)
    weights = {float(state["layer.1.weight"].norm()) for state in states}
    assert len(weights) == len(states)
    trainer = fit(
        others, module=make_line(Normed), strategy=averaging(), ckpt_path=tmp_path / "on_exception.ckpt", **options
    )
    assert trainer.current_epoch == 3


def test_a_strategy_that_shards_its_state_saves_nothing_then(fit, averaging, tmp_path):
    class Sharding(averaging):
        replicates_state = False

    with pytest.raises(RankFailedError, match="broken"):
        fit([OnExceptionCheckpoint(tmp_path), Break()], validates=False, devices=2, strategy=Sharding())
    assert names(tmp_path) == []


@pytest.mark.parametrize(("devices", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGINT)])
def test_after_a_signal_all_save_together(tmp_path, devices, number):
    script, target = tmp_path / "train.py", tmp_path / "c"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent.parent), target=str(target)))
    process = WarmProgram(script, str(devices))
    try:
        assert process.next_lines(devices) == ["running\n"] * devices
        process.send_signal(number)
        _, err = process.communicate(timeout=400)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode in (128 + number, -number)
    assert names(target) == ["on_exception.ckpt"], err
    step = read_checkpoint(target / "on_exception.ckpt")["global_step"]
    name = "Interrupted" if number == signal.SIGINT else "Terminated"
    assert err.count(f"{name} after step {step}: saved {target / 'on_exception.ckpt'}") == 1, err


def test_an_empty_name_is_refused(tmp_path):
    with pytest.raises(RequestError, match="filename='' is no name"):
        OnExceptionCheckpoint(tmp_path, "")


def test_a_folder_that_cannot_be_made_is_an_error_before_training(quiet_trainer, line, loader, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = quiet_trainer(callbacks=OnExceptionCheckpoint(tmp_path / "file" / "saved"))
    with pytest.raises(CheckpointError, match="file' is not a folder: pass another dirpath to OnExceptionCheckpoint"):
        trainer.fit(line, loader())
    assert trainer.global_step == 0
