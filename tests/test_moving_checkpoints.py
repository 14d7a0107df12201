"""A training that is stopped under one strategy goes on under any other, on any number of processes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, SingleDeviceStrategy, Trainer, TrainModule
from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import MisuseError
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

GLOBAL_BATCH = 12  # which 1, 2, 3 and 4 processes divide
STOPPED_AT, STEPS = 5, 15


@dataclass(frozen=True)
class Place:
    """Where a training runs: a row and a column of the matrix."""

    name: str
    strategy: Any
    devices: int
    shares: int | None = None  # of a batch; None is one for each device


def _fairscale() -> Any:
    from dstrat_fsdp import DDPShardedStrategy

    return DDPShardedStrategy


def _zero(stage: int) -> Any:
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=stage, start_method="fork")


PLACES = [
    Place("single_device", SingleDeviceStrategy, 1),
    *(Place(f"ddp on {n}", lambda: DDPStrategy(start_method="fork"), n) for n in (1, 2, 3, 4)),
    *(Place(f"fsdp on {n}", lambda: FSDPStrategy(start_method="fork"), n) for n in (2, 4)),
    Place("fsdp, two replicas", lambda: FSDPStrategy(start_method="fork", device_mesh=(2, 2)), 4),
    Place("model_parallel", lambda: ModelParallelStrategy(start_method="fork", tensor_parallel_size=2), 4, shares=2),
    *([Place("ddp_sharded", lambda: _fairscale()(start_method="fork"), 2)] if find_spec("fairscale") else []),
    *(
        Place(f"deepspeed, stage {stage} on {n}", partial(_zero, stage), n)
        for stage, n in ((0, 2), (1, 3), (2, 2), (3, 3))
        if find_spec("deepspeed")
    ),
]
NAMES = [place.name for place in PLACES]


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
    trainer.fit(
        module, DataLoader(data, batch_size=GLOBAL_BATCH // (place.shares or place.devices)), ckpt_path=ckpt_path
    )
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
