"""Trainings that stop under one strategy and go on under another, on two ranks of the CPU and two simulated devices."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.ranks import in_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

HPU_SIMULATOR = os.environ.get("DSTRAT_TEST_HPU_SIMULATOR")  # compiled for this torch; other processes do not see it
IPU_SIMULATOR = str(Path(__file__).parents[1] / "packages" / "ipu" / "tests" / "simulator")
STRATEGIES = {
    "ddp": ("dstrat_ddp:DDPStrategy", "cpu"),
    "horovod": ("dstrat_horovod:HorovodStrategy", "cpu"),
    "colossalai_torch_ddp": ("dstrat_colossalai:ColossalAITorchDDPStrategy", "cpu"),
    "hpu_parallel": ("dstrat_hpu:HPUParallelStrategy", "hpu"),
    "hpu_fsdp": ("dstrat_hpu:HPUFSDPStrategy", "hpu"),
    "ipu_strategy": ("dstrat_ipu:IPUStrategy", "ipu"),
}
DEVICES, STOPPED_AT, STEPS = 2, 6, 12


class Net(TrainModule):
    """Learns a sum, with an optimizer and a scheduler whose states matter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Losses(Callback):
    """Keeps the global loss of each batch, and saves in the middle."""

    saves_checkpoints = True

    def __init__(self, path):
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach().mean())))
        if self.path is not None and trainer.global_step == STOPPED_AT:
            trainer.save_checkpoint(self.path)


def train(cluster, name, *, start=None, save=None):
    """Train with a strategy of the table in this rank, from a checkpoint or to one; return the losses."""
    target, accelerator = STRATEGIES[name]
    package, _, class_name = target.partition(":")
    inputs = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    callback = Losses(save)
    trainer = Trainer(
        strategy=getattr(importlib.import_module(package), class_name)(),
        accelerator=accelerator,
        devices=DEVICES,
        max_epochs=1,
        callbacks=[callback],
        plugins=[] if accelerator == "ipu" else [cluster],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(dataset, batch_size=8 // DEVICES), ckpt_path=start)
    return callback.losses


def train_each(cluster, runs, simulator, folder):
    """Return the losses of several trainings in this rank, one after the other, which see one simulator."""
    os.environ |= {"HABANA_SIMULATOR_MACHINE": f"{folder}/machine", "PT_HPU_LAZY_MODE": "1"}
    os.environ["POPTORCH_SIMULATED_IPUS"] = str(DEVICES)
    if simulator:
        sys.path.insert(0, simulator)
    if simulator and simulator == HPU_SIMULATOR:
        importlib.import_module("habana_frameworks.torch")  # later, gradients of the device fail
    return [train(cluster, name, **options) for name, options in runs]


def check_moves(family, folder):
    """Check that a family resumes to the last bit, and goes on to 1e-5 from ddp and simulated devices, and back."""
    others = ["ddp", *(["hpu_parallel", "hpu_fsdp"] if HPU_SIMULATOR else [])]

    def in_two_ranks(runs):
        first, second = in_ranks(train_each, DEVICES, runs=runs, simulator=HPU_SIMULATOR, folder=folder)
        check("the second rank", second, first)
        return first

    def on_ipus(run):  # in one rank, which drives both
        [[losses]] = in_ranks(train_each, 1, runs=[run], simulator=IPU_SIMULATOR, folder=folder)
        return losses

    def saving(name):
        return name, {"save": f"{folder}/{name}"}

    def resuming(name, origin):
        return name, {"start": f"{folder}/{origin}"}

    begun = {"ipu_strategy": on_ipus(saving("ipu_strategy"))}
    first = [family, *others]
    moves = [*((family, origin) for origin in [*first, *begun]), *((other, family) for other in others)]
    losses = in_two_ranks([*map(saving, first), *(resuming(*move) for move in moves)])
    begun |= zip(first, losses, strict=False)
    resumed = dict(zip(moves, losses[len(first) :], strict=True))
    resumed["ipu_strategy", family] = on_ipus(resuming("ipu_strategy", family))

    whole = begun[family]
    check("the number of steps", len(whole), STEPS)
    check(f"{family} that goes on from itself", resumed[family, family], whole[STOPPED_AT:])
    for name, found in begun.items():
        check(name, found, pytest.approx(whole, rel=1e-5))
    for (name, origin), found in resumed.items():
        check(f"{name} that goes on from {origin}", found, pytest.approx(whole[STOPPED_AT:], rel=1e-5))


def check(what, found, expected):
    assert found == expected, f"{what} has {found} rather than {expected}"
