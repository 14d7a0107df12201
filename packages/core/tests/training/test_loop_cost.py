"""What a step costs, counted in calls of dstrat's functions: the same number on every machine and in every run.

A bound that is no longer needed may be lowered.  Before one is raised, look at what the new call is for, and whether it
could be found out once, before the first batch (``training/loops/steps.py``).
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat import Trainer, TrainModule

OURS = Path(dstrat.__file__).parent
ON_CPU = ACCELERATOR == "cpu"
WARMUP, STEPS = 3, 11


class CallCounter:
    """Counts the calls of functions in dstrat's files in each step.

    Comprehensions are left out: they are functions up to Python 3.11, and not any more since.
    """

    def __init__(self) -> None:
        self.step = 0
        self.calls: list[Counter[str]] = []

    def note_step(self) -> None:
        if self.step == WARMUP:
            self._previous = sys.getprofile()
            sys.setprofile(self._count)
        elif self.step == WARMUP + STEPS:
            sys.setprofile(self._previous)
        if WARMUP <= self.step < WARMUP + STEPS:
            self.calls.append(Counter())
        self.step += 1

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(OURS)) and not code.co_name.endswith("comp>"):
            self.calls[-1][f"{Path(code.co_filename).relative_to(OURS)}: {code.co_name}"] += 1

    def assert_at_most(self, most: int, what: str) -> None:
        assert len(self.calls) == STEPS, "the run was too short to count"
        # The median, because now and then a progress bar is drawn.
        usual = statistics.median_low([sum(calls.values()) for calls in self.calls])
        calls = next(calls for calls in self.calls if sum(calls.values()) == usual)
        listed = "\n".join(f"  {number} x {name}" for name, number in sorted(calls.items()))
        assert usual <= most, (
            f"{what} makes {usual} calls of dstrat's functions, and {most} are allowed: look at the loop for what can "
            f"be found out before the first batch.  The calls are\n{listed}"
        )


class Net(TrainModule):
    def __init__(self, **logs: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.counter = CallCounter()
        self.logs = logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.counter.note_step()
        loss = self.layer(batch[0]).sum()
        if self.logs:
            self.log("loss", loss, **self.logs)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2 * (WARMUP + STEPS + 2), 4)), batch_size=2)


def bare_trainer() -> Trainer:
    return Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


LOGGING = pytest.mark.parametrize(
    ("logs", "most"),  # those of a value that is kept on a device are some more
    [
        pytest.param({}, 0, id="that logs nothing"),
        pytest.param({"on_step": True, "on_epoch": False}, 3 if ON_CPU else 5, id="that logs a value of the step"),
        pytest.param({"on_step": False, "on_epoch": True}, 7 if ON_CPU else 10, id="that logs a value over the epoch"),
    ],
)


@LOGGING
def test_a_training_step_makes_few_calls(logs, most):
    net = Net(**logs)
    bare_trainer().fit(net, loader())
    base = 14 if ON_CPU else 20  # each of the batch's tensors is pinned and copied
    net.counter.assert_at_most(base + most, "a training step")


@LOGGING
def test_a_validation_batch_makes_few_calls(logs, most):
    net = Net(**logs)
    bare_trainer().validate(net, loader())
    net.counter.assert_at_most((4 if ON_CPU else 13) + most, "a validation batch")


def test_a_training_step_with_the_default_callbacks_and_logger_makes_few_calls(tmp_path, capsys):
    net = Net(on_step=True, on_epoch=True)
    Trainer(accelerator=ACCELERATOR, devices=1, max_epochs=1, default_root_dir=tmp_path).fit(net, loader())
    net.counter.assert_at_most(25 if ON_CPU else 34, "a training step")
