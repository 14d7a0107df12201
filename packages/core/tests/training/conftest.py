"""Small modules, data and trainers that the tests of training share."""

from __future__ import annotations

import os

import pytest
import torch
import torch._dynamo  # an optimizer imports it in its first step, and each forked rank would anew
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, ModelCheckpoint, ModelSummary, ProgressBar, Trainer, TrainModule

ACCELERATOR = os.environ.get("DSTRAT_TEST_ACCELERATOR", "cpu")  # here too, as programs import this file alone
_DEFAULT_CALLBACKS = {
    "enable_progress_bar": ProgressBar,
    "enable_model_summary": ModelSummary,
    "enable_checkpointing": ModelCheckpoint,
}


class Line(TrainModule):
    """Fits a sum of eight numbers."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.lr = lr

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, batch_idx):
        return batch[0].sum(1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Averaging(GradientSyncStrategy):
    """The strategy of GradientSyncStrategy's docstring: gradients averaged by hand."""

    start_method = "fork"

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class AveragingLater(Averaging):
    """The same after a backward pass in the process of the test, which beside a GPU cannot be forked then."""

    start_method = "fork" if ACCELERATOR == "cpu" else "forkserver"


def numbers(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture
def line():
    torch.manual_seed(0)
    return Line()


@pytest.fixture
def make_line():
    def make(cls=Line, **kwargs):
        torch.manual_seed(0)
        return cls(**kwargs)

    return make


@pytest.fixture
def line_class():
    return Line


@pytest.fixture
def averaging():
    return Averaging


@pytest.fixture
def averaging_later():
    return AveragingLater


@pytest.fixture
def loader():
    def make(batch_size: int = 8, *, count: int = 48, **kwargs):
        return DataLoader(numbers(count), batch_size=batch_size, **kwargs)

    return make


@pytest.fixture
def quiet_trainer(tmp_path):
    """Makes a Trainer that shows and writes nothing."""

    def make(**kwargs):
        options = {"accelerator": ACCELERATOR, "max_epochs": 2, "logger": False, "default_root_dir": tmp_path}
        if ACCELERATOR != "cpu":  # where it would take all devices
            options["devices"] = 1
        given = kwargs.get("callbacks") or []
        given = given if isinstance(given, list | tuple) else [given]
        for name, kind in _DEFAULT_CALLBACKS.items():
            if not any(isinstance(callback, kind) for callback in given):
                options[name] = False
        return Trainer(**(options | kwargs))

    return make
