from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta

import pytest

from dstrat import Callback, LambdaCallback, ModelCheckpoint, SingleDeviceStrategy, TorchCheckpointIO
from dstrat.checkpoint.async_io import AsyncCheckpointIO, finish_write
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import CheckpointError
from dstrat.training.module.loading import read_checkpoint

IOS = [PortableCheckpointIO, TorchCheckpointIO]


def names(folder):
    return sorted(path.name for path in folder.glob("*.ckpt"))


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_saved_in_the_background_is_what_was_trained_until_then(fit, averaging, tmp_path, io, devices):
    def run(folder, **arguments):
        callback = ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=2, every_n_train_steps=1, **arguments)
        options = {"devices": devices, "strategy": averaging() if devices > 1 else "auto", "plugins": [io()]}
        fit(callback, validates=False, **options)
        return callback

    callback = run("async", async_save=True, save_last=True)
    assert [name for name in names(tmp_path / "async") if name.startswith("step=")] == ["step=5.ckpt", "step=6.ckpt"]
    assert callback.best_model_path == str(tmp_path / "async" / "step=6.ckpt")
    for name in ("step=5.ckpt", "step=6.ckpt"):
        assert read_checkpoint(tmp_path / "async" / name)["global_step"] == int(name[len("step=")])


class Slow(TorchCheckpointIO):
    """Waits until it may write, and fails where it shall."""

    def __init__(self, fails_at=()):
        self.fails_at, self.threads, self.go = fails_at, [], threading.Event()

    def save_checkpoint(self, checkpoint, path):
        self.threads.append(threading.current_thread())
        assert self.go.wait(300)
        if checkpoint["global_step"] in self.fails_at:
            raise CheckpointError("no space left on device")
        super().save_checkpoint(checkpoint, path)


def test_training_goes_on_while_it_is_written_and_the_end_waits(fit, tmp_path):
    io, seen = Slow(), []

    def look(*_):
        seen.append(names(tmp_path))

    def let_go(*_):
        threading.Timer(0.2, io.go.set).start()

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, async_save=True)
    watch = LambdaCallback(on_train_batch_start=look, on_train_end=let_go)
    trainer = fit([callback, watch], validates=False, plugins=[io], max_epochs=1, limit_train_batches=5)
    assert not any(seen)
    assert io.threads[0] is not threading.main_thread()
    assert names(tmp_path) == ["step=3.ckpt"]
    assert trainer.strategy.checkpoint_io is io


def test_where_the_users_own_checkpoint_io_writes_in_the_background_links_and_loggers_wait_for_it(fit, tmp_path):
    io, seen = Slow(), []
    link = tmp_path / "last.ckpt"
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last="link")
    watch = LambdaCallback(
        on_train_batch_start=lambda *_: seen.append(link.is_symlink()),
        on_train_end=lambda *_: threading.Timer(0.2, io.go.set).start(),
    )
    plugins = [AsyncCheckpointIO(io)]
    fit([callback, watch], validates=False, plugins=plugins, max_epochs=1, limit_train_batches=3)
    assert not any(seen)
    assert link.resolve(strict=True) == tmp_path / "step=2.ckpt"


def test_an_error_surfaces_at_a_later_step_and_the_save_before_is_what_is_known(fit, tmp_path):
    io = Slow(fails_at=[2])
    io.go.set()
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, async_save=True, save_last=True)
    with pytest.raises(CheckpointError, match="was not written in the background: no space left on device"):
        fit([callback, LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.05))], validates=False, plugins=[io])
    assert names(tmp_path) == ["last.ckpt", "step=1.ckpt"]
    assert callback.best_model_path == str(tmp_path / "step=1.ckpt")


def test_an_error_does_not_wait_for_the_next_save(fit, tmp_path):
    io, steps = Slow(fails_at=[2]), []
    io.go.set()

    def note(trainer, *_):
        steps.append(trainer.global_step)
        time.sleep(0.05)

    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, async_save=True)
    with pytest.raises(CheckpointError, match="no space left on device"):
        fit([callback, LambdaCallback(on_train_batch_start=note)], validates=False, plugins=[io], limit_train_batches=6)
    assert steps[-1] == 2


def test_a_name_without_values_is_never_taken_twice(fit, tmp_path):
    callback = ModelCheckpoint(tmp_path, "same", every_n_train_steps=1, async_save=True)
    fit(callback, validates=False, limit_train_batches=6, max_epochs=2)
    assert names(tmp_path) in (["same.ckpt"], ["same-v1.ckpt"], ["same-v2.ckpt"])
    assert read_checkpoint(callback.best_model_path)["global_step"] == 12


@pytest.mark.parametrize("io", IOS)
def test_a_save_that_fails_leaves_the_one_before_and_what_is_known_of_it(fit, tmp_path, io, monkeypatch):
    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_last=True)
    states = []

    class Break(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 3:
                states.append(callback.state_dict())
                monkeypatch.setattr(io, "save_checkpoint", fail)

    def fail(self, checkpoint, path):
        raise CheckpointError("no space left on device")

    with pytest.raises(CheckpointError, match="no space left"):
        fit([callback, Break()], validates=False, plugins=[io()], limit_train_batches=6)
    assert callback.state_dict() == states[0]
    assert read_checkpoint(callback.best_model_path)["global_step"] == 2
    assert read_checkpoint(callback.last_model_path)["global_step"] == 2


@pytest.mark.parametrize("devices", [1, 2])
def test_an_exception_while_something_is_written_hangs_nobody(fit, averaging, tmp_path, devices):
    class Break(Callback):
        runs_last = saves_checkpoints = True

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3 and trainer.global_rank == devices - 1:
                raise ValueError("broken")

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, async_save=True, save_top_k=-1)
    with pytest.raises((ValueError, RuntimeError), match="broken"):
        fit([callback, Break()], validates=False, devices=devices, strategy=averaging() if devices > 1 else "auto")
    assert read_checkpoint(tmp_path / "last")["global_step"] in (2, 3)


@pytest.fixture
def log_file(tmp_path):
    """The log of all ranks, which are forked."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("dstrat").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("dstrat").removeHandler(handler)
    handler.close()


class WritesAfterFailure(PortableCheckpointIO):
    """Begins to write when the run has failed, and takes a moment, in which its communication would be closed."""

    def __init__(self, marker):
        super().__init__()
        self.marker = marker

    def write(self, staged, path):
        while not self.marker.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        super().write(staged, path)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken"), KeyboardInterrupt("broken")])
@pytest.mark.parametrize("ranks", [(0,), (1,), pytest.param((0, 1), marks=pytest.mark.variant)])
def test_a_checkpoint_in_flight_is_completed_by_all_ranks_if_one_fails(
    fit, averaging, tmp_path, log_file, line_class, make_line, error, ranks
):
    class Break(line_class):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 3 and self.trainer.global_rank in ranks:
                (tmp_path / "failed").touch()
                raise error
            return super().training_step(batch, batch_idx)

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, async_save=True)
    options = {"devices": 2, "strategy": averaging(), "plugins": [WritesAfterFailure(tmp_path / "failed")]}
    with pytest.raises(BaseException) as caught:
        fit(callback, module=make_line(Break), validates=False, **options)
    assert read_checkpoint(tmp_path / "last")["global_step"] == 3
    assert names(tmp_path) == ["step=3.ckpt"]
    logged = log_file.read_text()
    assert "lost" not in logged
    assert "was not written" not in logged
    assert any(f"rank {rank} ends with {type(error).__name__}: broken; checkpoint " in logged for rank in ranks)
    if isinstance(error, Exception):
        assert any(f"rank {rank} of 2 failed" in str(caught.value) for rank in ranks)


def test_the_wait_for_a_checkpoint_in_flight_has_a_limit(tmp_path, caplog):
    class Impatient(SingleDeviceStrategy):
        timeout = timedelta(seconds=0.2)

    slow = Slow()
    strategy = Impatient(checkpoint_io=AsyncCheckpointIO(slow))
    strategy.checkpoint_io.save_checkpoint({"global_step": 1}, tmp_path / "a.ckpt")
    finish_write(strategy, ValueError("broken"), logs=True)
    slow.go.set()
    assert "rank 0 ends with ValueError: broken; checkpoint" in caplog.text
    assert "a.ckpt' was not complete 0.1 s later, and is given up" in caplog.text
    strategy.checkpoint_io.teardown()


def test_a_link_leads_to_a_checkpoint_also_after_an_exception_while_one_is_written(fit, tmp_path):
    io, led_to = Slow(), []
    io.go.set()

    class Break(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 1:
                trainer.strategy.checkpoint_io.wait()
                io.go.clear()
            elif trainer.global_step == 2:
                led_to.append((tmp_path / "last.ckpt").readlink().name)
                io.go.set()
                raise ValueError("broken")

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, async_save=True, save_last="link")
    with pytest.raises(ValueError, match="broken"):
        fit([callback, Break()], validates=False, plugins=[io])
    assert led_to == ["step=1.ckpt"]
    assert names(tmp_path) == ["last.ckpt", "step=2.ckpt"]
    assert read_checkpoint(tmp_path / "last.ckpt")["global_step"] == 2


def test_a_link_leads_to_a_checkpoint_also_while_the_next_one_is_not_told_of(fit, tmp_path):
    seen = []

    def look(trainer, *_):
        if trainer.global_step > 1:
            trainer.strategy.checkpoint_io.wait()
            seen.append((tmp_path / "last.ckpt").exists())

    callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, async_save=True, save_last="link")
    fit([callback, LambdaCallback(on_train_batch_start=look)], validates=False, plugins=[TorchCheckpointIO()])
    assert all(seen)
    assert seen
    assert names(tmp_path) == ["last.ckpt", "step=6.ckpt"]


def test_an_exception_leaves_a_checkpoint_where_that_is_asked_for(fit, tmp_path):
    class Break(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 3:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fit([ModelCheckpoint(tmp_path, save_on_exception=True), Break()], validates=False)
    assert read_checkpoint(tmp_path / "on_exception.ckpt")["global_step"] == 3
