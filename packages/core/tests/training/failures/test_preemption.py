"""Signals by which a scheduler announces the end of a job: a checkpoint is saved before the deadline."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm_program import WarmProgram

from dstrat import CSVLogger, ModelCheckpoint, OnExceptionCheckpoint
from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import ClusterError, ConflictError, RequestError
from dstrat.training.loops.stopping import Interruption

SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from dstrat import Callback, ModelCheckpoint, Trainer
sys.path.insert(0, {folder!r})
from conftest import ACCELERATOR, Averaging, Line, numbers

devices, deadline, step_seconds, save_seconds = int(sys.argv[1]), float(sys.argv[2]), *map(float, sys.argv[3:5])

class Slow(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_step == 2:
            os.write(1, b"running\\n")
        if trainer.global_step < 4:
            time.sleep(step_seconds)

    def state_dict(self):
        time.sleep(save_seconds)
        return {{}}

trainer = Trainer(
    accelerator=ACCELERATOR, devices=devices, strategy=Averaging(start_method="fork") if devices > 1 else "auto",
    max_epochs=1, default_root_dir={root!r}, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[Slow(), ModelCheckpoint(every_n_train_steps=2)], preemption_deadline=deadline,
)
trainer.fit(Line(), DataLoader(numbers(96), batch_size=4), resume="auto")
print("ended after", trainer.global_step)
"""


@pytest.fixture
def training(tmp_path):
    """Starts a training as a program of its own, and ends it after the test whatever happens."""
    started = []

    def start(devices, *, deadline=60.0, step_seconds=0.0, save_seconds=0.0):
        script = tmp_path / "train.py"
        folder = str(Path(__file__).parents[1])
        script.write_text(SCRIPT.format(folder=folder, root=str(tmp_path / "root")))
        started.append(WarmProgram(script, *map(str, (devices, deadline, step_seconds, save_seconds))))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.variant)])
def test_checkpoint_is_saved_after_a_slow_step(training, tmp_path, devices, number):
    process = training(devices, step_seconds=1.0)
    assert process.next_lines(devices) == ["running\n"] * devices
    process.send_signal(number)
    if number == signal.SIGUSR1:
        process.send_signal(number)  # as some schedulers do
    _, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert re.search(
        r"Terminated after step \d+: saved .*on_exception.ckpt\n.* s remain of preemption_deadline=60", err
    )
    out, err = training(devices).communicate()
    assert re.search("resume='auto': training resumes from .*on_exception.ckpt", err)
    assert f"ended after {24 // devices}" in out


@pytest.mark.slow
def test_save_that_may_take_too_long_is_reported(training):
    process = training(2, deadline=4.0, step_seconds=0.6, save_seconds=5.0)
    assert process.next_lines(2) == ["running\n"] * 2
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate()
    assert re.search(r"Terminated: saving took \d+\.\d s the last time, and -?\d\.\d s remain of preemption_deadl", err)
    assert "SIGUSR1: ranks 0, 1 of 2 did not stop within 4 s, and are ended: a checkpoint that was to be" in err


def test_second_sigusr1_has_no_effect_while_the_run_ends():
    previous = signal.getsignal(signal.SIGUSR1)
    interruption = Interruption(10)

    def be_interrupted_and_end():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("end")

    try:
        with pytest.raises(ValueError, match="end"), interruption:
            be_interrupted_and_end()
        assert interruption.remaining == pytest.approx(10, abs=5)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, previous)


LATE = """
import os, signal
from dstrat.training.loops.stopping import Interruption

class Late:
    def __del__(self):  # when Python ends, after its own handlers
        os.kill(os.getpid(), signal.SIGUSR1)

late = Late()
with Interruption(10):
    pass
os.kill(os.getpid(), signal.SIGUSR1)
with Interruption(10) as interruption:
    pass
os.kill(os.getpid(), signal.SIGUSR1)
with Interruption(10) as interruption:
    os.kill(os.getpid(), signal.SIGUSR1)
assert interruption.requested == signal.SIGUSR1
print("ended")
"""


def test_sigusr1_after_a_complete_run_ends_no_process():
    done = subprocess.run([sys.executable, "-c", LATE], check=False, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert done.stderr.count("SIGUSR1 came after the end of the run: there is nothing to save") == 3


def test_sigusr1_is_the_users_without_a_deadline():
    received = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGUSR1)
        assert received
        assert not interruption.requested
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_only_a_signal_saves_where_only_a_deadline_was_asked_for(quiet_trainer, loader, make_line, tmp_path):
    class Breaking(type(make_line())):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            raise ValueError("boom")

    trainer = quiet_trainer(callbacks=[ModelCheckpoint(tmp_path)], preemption_deadline=10)
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(make_line(Breaking), loader())
    assert not list(tmp_path.iterdir())


def test_callback_that_saves_on_exceptions_saves_alone(quiet_trainer, loader, make_line, tmp_path):
    class Interrupting(type(make_line())):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            signal.raise_signal(signal.SIGTERM)

    callbacks = [ModelCheckpoint(tmp_path / "regular"), OnExceptionCheckpoint(tmp_path / "rescue")]
    trainer = quiet_trainer(callbacks=callbacks, preemption_deadline=10)
    with pytest.raises(SystemExit):
        trainer.fit(make_line(Interrupting), loader())
    assert [path.name for path in tmp_path.glob("*/*.ckpt")] == ["on_exception.ckpt"]


@pytest.mark.parametrize("seconds", [0, -1, "30", True, float("nan")])
def test_deadline_is_a_number_of_seconds(quiet_trainer, seconds):
    with pytest.raises(RequestError, match=r"preemption_deadline=.* must be a number of seconds above 0, such as 90"):
        quiet_trainer(preemption_deadline=seconds)


def test_deadline_without_a_callback_that_saves_is_an_error(quiet_trainer):
    with pytest.raises(ConflictError, match="saves a checkpoint on SIGTERM and SIGUSR1, and no callback saves any"):
        quiet_trainer(preemption_deadline=30)


class Queue(LocalEnvironment):
    """A scheduler that queues the job again after a SIGUSR1."""

    requeue_signal = signal.SIGUSR1
    is_refused = False

    def __init__(self, folder):
        super().__init__()
        self.folder = folder
        self.saved = []

    def requeue(self):
        self.saved.append([path.name for path in self.folder.glob("*.ckpt")])
        if self.is_refused:
            raise ClusterError("the queue is closed")


def interrupting(base, number):
    class Interrupting(base):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            signal.raise_signal(number)

    return Interrupting


@pytest.mark.parametrize(("number", "requeues"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_job_is_queued_again_after_its_checkpoint_by_that_signal_alone(
    quiet_trainer, loader, make_line, tmp_path, number, requeues
):
    queue = Queue(tmp_path)
    trainer = quiet_trainer(callbacks=[ModelCheckpoint(tmp_path)], preemption_deadline=10, plugins=queue)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(make_line(interrupting(type(make_line()), number)), loader())
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert caught.value.code == 128 + number
    assert queue.saved == ([["on_exception.ckpt"]] if requeues else [])


@pytest.mark.parametrize("version", [None, "mine"])
def test_job_that_is_queued_again_resumes_from_its_checkpoint_in_the_folder_of_a_logger(
    quiet_trainer, loader, make_line, tmp_path, version
):
    def trainer():
        logger = CSVLogger(tmp_path / "logs", version=version)
        return quiet_trainer(
            callbacks=[ModelCheckpoint()],
            logger=logger,
            default_root_dir=tmp_path / "root",
            preemption_deadline=10,
            plugins=Queue(tmp_path),
            max_epochs=2,
        )

    with pytest.raises(SystemExit):
        trainer().fit(make_line(interrupting(type(make_line()), signal.SIGUSR1)), loader(), resume="auto")
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    (saved,) = (tmp_path / "logs").rglob("on_exception.ckpt")
    again = trainer()
    again.fit(make_line(), loader(), resume="auto")
    assert again.ckpt_path == str(saved)
    assert again.global_step == 2 * len(loader())


def test_job_that_is_not_queued_again_logs_why(quiet_trainer, loader, make_line, tmp_path, caplog):
    queue = Queue(tmp_path)
    queue.is_refused = True
    trainer = quiet_trainer(callbacks=[ModelCheckpoint(tmp_path)], preemption_deadline=10, plugins=queue)
    with pytest.raises(SystemExit):
        trainer.fit(make_line(interrupting(type(make_line()), signal.SIGUSR1)), loader())
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert "the queue is closed" in caplog.text
    assert "is queued again" not in caplog.text


def test_job_that_would_be_queued_again_without_a_checkpoint_is_an_error(quiet_trainer, tmp_path):
    with pytest.raises(ConflictError, match="Queue queues the job again after SIGUSR1, and without a preemption_deadl"):
        quiet_trainer(plugins=Queue(tmp_path))
