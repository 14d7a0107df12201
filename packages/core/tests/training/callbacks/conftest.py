"""A terminal and what it shows, and fits of a module whose logged values are given."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import threading

import pytest
import torch

from dstrat import TrainModule

_TOKEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """The lines of a terminal, and whether its cursor is visible.

    It follows the few control sequences that a bar needs: line ends, cursor up, erase to the end, show and hide the
    cursor.
    """

    def __init__(self, text: str) -> None:
        self.cursor_is_visible = True
        lines, row, column = [""], 0, 0
        for private, numbers, command, character in _TOKEN.findall(text):
            if character == "\r":
                column = 0
            elif character == "\n":
                row += 1
                lines += [""] * (row - len(lines) + 1)
            elif character:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + character + line[column + 1 :]
                column += 1
            elif private:
                assert numbers == "25", f"unknown private mode {numbers}"
                self.cursor_is_visible = command == "h"
            elif command == "A":
                row -= int(numbers or 1)
                assert row >= 0
            elif command == "J":
                assert not numbers, f"unknown erasure {numbers}"
                lines[row:] = [lines[row][:column]]
            else:
                assert command == "m", f"unknown sequence {numbers}{command}"
        self.lines = [line.rstrip() for line in lines]


@pytest.fixture
def make_screen():
    return Screen


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout and stderr a terminal of 100 columns for a while; the screen that it gives is filled at its end."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")

    @contextlib.contextmanager
    def open_():
        master, slave = pty.openpty()
        received = []
        reader = threading.Thread(target=_drain, args=(master, received), daemon=True)
        reader.start()
        screen = Screen("")
        with os.fdopen(slave, "w", buffering=1, encoding="utf-8") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", stream)
            yield screen
            assert sys.stdout is sys.stderr is stream
        reader.join(300)
        os.close(master)
        screen.__init__(b"".join(received).decode())

    return open_


def _drain(descriptor, received):
    with contextlib.suppress(OSError):  # what Linux says when the other end was closed
        while data := os.read(descriptor, 65536):
            received.append(data)


class Scripted(TrainModule):
    """Logs the values that it is given: one for each validation, and one for each epoch of training."""

    def __init__(self, scores=(), *, name="score", train_scores=(), lr=0.01):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.scores, self.name, self.train_scores, self.lr = list(scores), name, list(train_scores), lr

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self):
        if self.train_scores:
            self.log("train_score", self.train_scores.pop(0))

    def validation_step(self, batch, batch_idx):
        if self.trainer.sanity_checking:
            self.log(self.name, -1000.0)
        elif batch_idx == 0 and self.scores:
            self.log(self.name, self.scores.pop(0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture
def scripted():
    return Scripted


@pytest.fixture
def fit(quiet_trainer, loader):
    """Fits with callbacks, by default over two batches and a validation in each epoch."""

    def fit_(callbacks, scores=(), *, module=None, validates=True, ckpt_path=None, **options):
        trainer = quiet_trainer(callbacks=callbacks, **({"limit_train_batches": 2, "max_epochs": 3} | options))
        trainer.fit(module or Scripted(scores), loader(), loader() if validates else None, ckpt_path=ckpt_path)
        return trainer

    return fit_
