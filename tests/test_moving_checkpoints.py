"""A training that is stopped under one strategy goes on under any other, on any number of processes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.made_once import made_once
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, SingleDeviceStrategy, Trainer, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import MisuseError
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

GLOBAL_BATCH = 12  # which 1, 2, 3 and 4 processes divide
BATCHES = 4  # of an epoch, of which two are begun
STOPPED_AT, STEPS = 3, 5


@dataclass(frozen=True)
class Place:
    """Where a training runs: a row and a column of the matrix."""

    name: str
    strategy: Any
    devices: int
    shares: int | None = None  # of a batch; None is one for each device


def _fairscale() -> Any:
    from dstrat_fairscale import DDPShardedStrategy

    return DDPShardedStrategy()


def _zero(stage: int) -> Any:
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=stage)


PLACES = [
    Place("single_device", SingleDeviceStrategy, 1),
    *(Place(f"ddp on {n}", DDPStrategy, n) for n in (1, 2, 3, 4)),
    *(Place(f"fsdp on {n}", FSDPStrategy, n) for n in (2, 4)),
    Place("fsdp, two replicas", partial(FSDPStrategy, device_mesh=(2, 2)), 4),
    Place("model_parallel", partial(ModelParallelStrategy, tensor_parallel_size=2), 4, shares=2),
    *([Place("ddp_sharded", _fairscale, 2)] if find_spec("fairscale") else []),
    *(
        Place(f"deepspeed, stage {stage} on {n}", partial(_zero, stage), n)
        for stage, n in ((0, 2), (1, 3), (2, 2), (3, 3))
        if find_spec("deepspeed")
    ),
]
BY_NAME = {place.name: place for place in PLACES}


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def configure_model(self):
        with contextlib.suppress(MisuseError):  # which the strategies without a mesh raise
            if "tensor_parallel" in self.device_mesh.mesh_dim_names:
                mesh = self.device_mesh["tensor_parallel"]
                parallelize_module(self.layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Saves(Callback):
    """Saves in the middle, and keeps the whole weights of the end."""

    saves_checkpoints = runs_last = True

    def __init__(self, path=None):
        self.path = path
        self.weights = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.path is not None and trainer.global_step == STOPPED_AT:
            trainer.save_checkpoint(self.path)

    def on_fit_end(self, trainer, module):
        self.weights = [number for value in trainer.strategy.module_state_dict().values() for number in value.flatten()]


def fit(place, cluster, folder, *, steps, save_to=None, ckpt_path=None):
    """Train in a rank; return the whole weights, in rank 0."""
    x = torch.randn(BATCHES * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    callback = Saves(save_to)
    trainer = Trainer(
        accelerator="cpu",
        strategy=place.strategy(),
        devices=place.devices,
        max_steps=steps,
        gradient_clip_val=1.0,
        plugins=[PortableCheckpointIO(), *([] if place.strategy is SingleDeviceStrategy else [cluster])],
        callbacks=callback,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // (place.shares or place.devices))
    trainer.fit(Net(), loader, ckpt_path=ckpt_path)
    assert trainer.global_step == steps
    return list(map(float, callback.weights))


def save(cluster, name, folder):
    fit(BY_NAME[name], cluster, folder, steps=STOPPED_AT, save_to=folder / name)


def go_on(cluster, name, origin, folder):
    return fit(BY_NAME[name], cluster, folder, steps=STEPS, ckpt_path=folder / origin)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return fit(PLACES[0], None, tmp_path_factory.mktemp("whole"), steps=STEPS)


def save_each(folder):
    for devices in {place.devices for place in PLACES}:
        names = [place.name for place in PLACES if place.devices == devices]
        in_ranks(each, devices, function=save, cases={name: {"name": name, "folder": folder} for name in names})


@pytest.fixture(scope="module")
def saved(tmp_path_factory, worker_id):
    """A folder with a checkpoint of each place."""
    return made_once(save_each, "moving_checkpoints", tmp_path_factory, worker_id)


REPEATED = {
    "ddp on 4",
    "fsdp on 4",
    "fsdp, two replicas",
    "deepspeed, stage 1 on 3",
}  # go on as others do; those go on from these too


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.variant] if name in REPEATED else []) for name in BY_NAME]
)
def test_it_goes_on_as_if_it_had_not_moved_from_anywhere(saved, name, uninterrupted):
    cases = {origin: {"name": name, "origin": origin, "folder": saved} for origin in BY_NAME}
    weights = in_ranks(each, BY_NAME[name].devices, function=go_on, cases=cases)[0]
    assert weights == dict.fromkeys(BY_NAME, pytest.approx(uninterrupted, rel=1e-6, abs=1e-7))
