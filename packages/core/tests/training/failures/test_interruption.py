from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from tests.warm_program import WarmProgram
from torch import nn

from dstrat import Callback, TrainModule
from dstrat.training.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from dstrat.training.loops.stopping import Interruption


class Drops(TrainModule):
    """Draws random numbers in each step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.validated = []

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layer(nn.functional.dropout(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append(self.training_step(batch, batch_idx).item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Callback, Trainer
from dstrat.plugins.registry import StrategyRegistry
sys.path.insert(0, {folder!r})
from conftest import ACCELERATOR, Averaging, Line, numbers

class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 20:
            os.write(1, b"running\\n")
        time.sleep(0.005)

    def on_exception(self, trainer, module, exception):
        name = type(exception).__name__
        os.write(1, f"rank {{trainer.global_rank}} stopped after {{trainer.global_step}} by {{name}}\\n".encode())

class Slow(Line):
    def evaluate(self, batch, batch_idx):
        if batch_idx == 3:
            os.write(1, b"running\\n")
        time.sleep(0.02 * (1 + self.global_rank))
        Slow.done = batch_idx + 1

    validation_step = test_step = predict_step = evaluate

class TellEvaluated(Callback):
    def on_exception(self, trainer, module, exception):
        name = type(exception).__name__
        os.write(1, f"rank {{trainer.global_rank}} stopped after {{Slow.done}} by {{name}}\\n".encode())

if __name__ == "__main__" and sys.argv[3] != "train":
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=int(sys.argv[1]), max_epochs=1,
        strategy=Averaging(start_method=sys.argv[2]) if sys.argv[1] != "1" else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=TellEvaluated(), num_sanity_val_steps=-1 if sys.argv[3] == "sanity" else 0,
    )
    many = DataLoader(TensorDataset(*(x.repeat(200, 1) for x in numbers().tensors)), batch_size=4)
    module = Slow(lr=0.0)
    if sys.argv[3] in ("fit", "sanity"):
        trainer.fit(module, DataLoader(numbers(), batch_size=4), many)
    else:
        getattr(trainer, sys.argv[3])(module, many)
elif __name__ == "__main__":
    trainer = Trainer(
        accelerator=ACCELERATOR, devices=int(sys.argv[1]), max_epochs=-1,
        strategy=Averaging(start_method=sys.argv[2]) if sys.argv[1] != "1" else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=Tell(),
    )
    trainer.fit(Line(lr=0.0), DataLoader(numbers(), batch_size=4))
"""


@pytest.fixture
def training(tmp_path):
    """Starts an endless training as a program of its own, and ends it after the test whatever happens."""
    started = []

    def start(devices, start_method="fork", what="train"):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(folder=str(Path(__file__).parents[1])))
        process = WarmProgram(script, str(devices), start_method, what)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_until_running(process, ranks):
    assert process.next_lines(ranks) == ["running\n"] * ranks


@pytest.mark.parametrize(
    ("devices", "start_method", "number", "code"),
    [
        (1, "-", signal.SIGTERM, 143),
        (2, "fork", signal.SIGTERM, 143),
        (2, "forkserver", signal.SIGINT, 130),
        (2, "fork", signal.SIGHUP, 129),
    ],
)
def test_a_signal_stops_all_ranks_at_the_same_step(training, devices, start_method, number, code):
    process = training(devices, start_method)
    wait_until_running(process, devices)
    process.send_signal(number)
    out, err = process.communicate(timeout=400)
    stopped = re.findall(r"rank (\d) stopped after (\d+) by (\w+)", out)
    assert {rank for rank, _, _ in stopped} == {str(rank) for rank in range(devices)}, (out, err)
    assert len({step for _, step, _ in stopped}) == 1, stopped
    assert {name for _, _, name in stopped} == {"Interrupted" if number == signal.SIGINT else "Terminated"}
    assert process.returncode in (code, -number)


def ranks_of(process):
    """Return the process ids of forked ranks; the watchdog is a shell."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() != "sh\n")


def test_a_rank_that_is_killed_from_outside_is_named_and_all_stop_at_the_same_step(training):
    process = training(2)
    wait_until_running(process, 2)
    os.kill(ranks_of(process)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=400)
    stopped = re.findall(r"rank (\d) stopped after (\d+) by Terminated", out)
    assert len(stopped) == 2
    assert len({step for _, step in stopped}) == 1, stopped
    assert process.returncode == 143
    assert "SIGTERM: rank 1 of 2 received it from outside of this job" in err


def test_a_signal_that_is_ignored_stays_so():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
        assert interruption.requested == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize(
    ("devices", "what", "number"),
    [
        pytest.param(1, "validate", signal.SIGTERM, marks=pytest.mark.slow),
        (1, "sanity", signal.SIGINT),
        (2, "fit", signal.SIGTERM),
        pytest.param(2, "test", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(2, "predict", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_ranks_at_the_same_batch_of_an_evaluation(training, devices, what, number):
    process = training(devices, "fork", what)
    wait_until_running(process, devices)
    process.send_signal(number)
    out, err = process.communicate(timeout=400)
    stopped = re.findall(r"rank (\d) stopped after (\d+) by (\w+)", out)
    assert {rank for rank, _, _ in stopped} == {str(rank) for rank in range(devices)}, (out, err)
    assert len({batch for _, batch, _ in stopped}) == 1, stopped
    assert {name for _, _, name in stopped} == {"Interrupted" if number == signal.SIGINT else "Terminated"}
    assert int(stopped[0][1]) < 2400 / devices  # it did not go on to the end


def test_a_signal_that_comes_too_late_for_the_last_step_acts_at_the_end():
    noted = []
    with pytest.raises(KeyboardInterrupt), Interruption() as interruption:
        noted.extend([signal.raise_signal(signal.SIGINT), interruption.requested])
    assert noted == [None, signal.SIGINT]


def test_an_ignored_signal_does_not_stop_the_steps():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            assert not interruption.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_without_a_handler_that_comes_too_late_lets_the_run_be_cleaned_up(tmp_path, number, code):
    def be_interrupted():
        signal.signal(number, signal.SIG_DFL)
        try:
            with Interruption():
                signal.raise_signal(number)
        except KeyboardInterrupt:
            sys.exit(130)
        finally:
            (tmp_path / "cleaned up").touch()

    process = multiprocessing.get_context("fork").Process(target=be_interrupted)
    process.start()
    process.join(300)
    assert process.exitcode == code
    assert (tmp_path / "cleaned up").exists()


def test_a_signal_is_forgotten_when_something_else_ended_the_steps():
    interruption = Interruption()

    def be_interrupted_and_fail():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("else")

    with pytest.raises(ValueError, match="else"), interruption:
        be_interrupted_and_fail()
    with interruption:
        assert not interruption.requested


def test_a_validation_that_was_interrupted_runs_again_when_the_fit_goes_on(quiet_trainer, loader, tmp_path):
    def fit(callbacks, ckpt_path=None):
        torch.manual_seed(3)
        module = Drops()
        trainer = quiet_trainer(callbacks=callbacks, val_check_interval=4)
        trainer.fit(module, loader(shuffle=True), loader(shuffle=True), ckpt_path=ckpt_path)
        return module

    class Interrupting(Callback):
        def on_validation_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 4 and batch_idx == 2:
                signal.raise_signal(signal.SIGINT)

    whole = fit([])
    saved = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit([Interrupting(), saved])
    resumed = fit([], saved.ckpt_path)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    assert resumed.validated == whole.validated[-len(resumed.validated) :]
    assert len(resumed.validated) == 2 * 6  # that of step 4, and that of the next epoch
