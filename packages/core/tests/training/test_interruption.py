from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from dstrat import Callback, Trainer
from dstrat.plugins.registry import StrategyRegistry
sys.path.insert(0, {folder!r})
from conftest import Averaging, Line, numbers

class Tell(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 20:
            os.write(1, b"running\\n")
        time.sleep(0.005)

    def on_exception(self, trainer, module, exception):
        name = type(exception).__name__
        os.write(1, f"rank {{trainer.global_rank}} stopped after {{trainer.global_step}} by {{name}}\\n".encode())

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu", devices=int(sys.argv[1]), max_epochs=-1,
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

    def start(devices, start_method="fork"):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT.format(folder=os.path.dirname(__file__)))  # noqa: PTH120 - a string for a program
        process = subprocess.Popen(
            [sys.executable, str(script), str(devices), start_method],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until_running(process, ranks):
    for _ in range(ranks):
        line = process.stdout.readline()
        assert line == "running\n", line


@pytest.mark.parametrize(
    ("devices", "start_method", "number", "code"),
    [(1, "-", signal.SIGTERM, 143), (2, "fork", signal.SIGTERM, 143), (2, "popen", signal.SIGINT, 130)],
)
def test_a_signal_stops_all_ranks_at_the_same_step(training, devices, start_method, number, code):
    process = training(devices, start_method)
    wait_until_running(process, devices)
    process.send_signal(number)
    began = time.monotonic()
    out, err = process.communicate(timeout=30)
    stopped = re.findall(r"rank (\d) stopped after (\d+) by (\w+)", out)
    assert {rank for rank, _, _ in stopped} == {str(rank) for rank in range(devices)}, (out, err)
    assert len({step for _, step, _ in stopped}) == 1, stopped
    assert {name for _, _, name in stopped} == {"Interrupted" if number == signal.SIGINT else "Terminated"}
    assert process.returncode in (code, -number)
    assert time.monotonic() - began < 10
