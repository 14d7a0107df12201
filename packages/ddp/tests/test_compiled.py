"""Modules that are compiled in place, under ddp."""

from __future__ import annotations

import pytest
import torch
from tests.accelerators import ACCELERATOR, START_METHOD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import ModelCheckpoint, Trainer, TrainModule
from dstrat.training.module.loading import read_checkpoint
from dstrat_ddp import DDPStrategy

NAMES = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.fixture
def train(tmp_path):
    def run(*, compiled, devices, batch_size, max_epochs=1, ckpt_path=None):
        torch.manual_seed(0)
        module = Net()
        if compiled:
            module.compile(backend="eager", dynamic=False)
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch_size)
        checkpoint = ModelCheckpoint(dirpath=tmp_path / f"{devices}-{compiled}-{max_epochs}")
        trainer = Trainer(
            accelerator=ACCELERATOR,
            strategy=DDPStrategy(start_method=START_METHOD) if devices > 1 else "single_device",
            devices=devices,
            max_epochs=max_epochs,
            callbacks=checkpoint,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
        return module, float(trainer.callback_metrics["val_loss"]), checkpoint.best_model_path

    return run


def test_they_train_as_on_one_device_and_their_names_are_plain(train):
    plain, expected, _ = train(compiled=False, devices=1, batch_size=8, max_epochs=2)
    module, _, path = train(compiled=True, devices=2, batch_size=4)
    assert list(module.state_dict()) == list(read_checkpoint(path)["state_dict"]) == NAMES
    resumed, loss, _ = train(compiled=True, devices=2, batch_size=4, max_epochs=2, ckpt_path=path)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(resumed.net[0].weight, plain.net[0].weight, rtol=1e-4)
