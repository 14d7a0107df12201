"""A training that is stopped under one strategy goes on under any other, on any number of processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, SingleDeviceStrategy, Trainer, TrainModule
from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy

GLOBAL_BATCH = 12  # which 1, 2, 3 and 4 processes divide
STOPPED_AT, STEPS = 5, 15


@dataclass(frozen=True)
class Place:
    """Where a training runs: a row and a column of the matrix."""

    name: str
    strategy: Any
    devices: int


PLACES = [
    Place("single_device", SingleDeviceStrategy, 1),
    *(Place(f"ddp on {n}", lambda: DDPStrategy(start_method="fork"), n) for n in (1, 2, 3, 4)),
    *(Place(f"fsdp on {n}", lambda: FSDPStrategy(start_method="fork"), n) for n in (2, 4)),
]
NAMES = [place.name for place in PLACES]


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Saves(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == STOPPED_AT:
            trainer.save_checkpoint(self.path)


def fit(place, tmp_path, *, steps, callbacks=(), ckpt_path=None):
    x = torch.randn(8 * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        strategy=place.strategy(),
        devices=place.devices,
        max_steps=steps,
        gradient_clip_val=1.0,
        plugins=[PortableCheckpointIO()],
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader(data, batch_size=GLOBAL_BATCH // place.devices), ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return fit(PLACES[0], tmp_path_factory.mktemp("whole"), steps=STEPS)


@pytest.fixture(scope="module", params=PLACES, ids=NAMES)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    fit(request.param, folder, steps=STOPPED_AT, callbacks=[Saves(folder / "checkpoint")])
    return folder / "checkpoint"


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_it_goes_on_as_if_it_had_not_moved(saved, place, uninterrupted, tmp_path):
    weights = fit(place, tmp_path, steps=STEPS, ckpt_path=saved)
    torch.testing.assert_close(weights, uninterrupted, rtol=1e-6, atol=1e-7)
