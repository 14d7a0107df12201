"""Runs with a Trainer that prints and writes nothing by itself, on one device or in a rank of several."""

from __future__ import annotations

import torch
from tests.accelerators import ACCELERATOR
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule


def quiet_trainer(strategy, cluster=None, *, plugins=(), **options):
    """A Trainer for one epoch, unless the options say otherwise."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    devices = 1 if cluster is None else cluster.world_size
    return Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        plugins=[*plugins, *([] if cluster is None else [cluster])],
        **{"devices": devices, "max_epochs": 1} | quiet | options,
    )


def loader(samples, batch_size):
    """Inputs, and the differences of their halves, in their order."""
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:]), batch_size=batch_size)


def shuffled_loader(samples, batch_size):
    """Inputs and their sums, in an order that begins with this call."""
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size, shuffle=True)


class Evaluated(TrainModule):
    """A module of the hand-written loop, as ``net``, that is fitted, validated, tested and predicted with."""

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net.training_step(batch, batch_idx))
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.net.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(Callback):
    """Keeps the global loss of each batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"]
        self.losses.append(float(trainer.strategy.reduce(loss.detach())))


class Saves(Callback):
    """Saves a checkpoint after some batches, named by their number."""

    saves_checkpoints = runs_last = True

    def __init__(self, folder, moments):
        self.folder, self.moments = folder, moments

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen in self.moments:
            trainer.save_checkpoint(self.folder / str(trainer.fit_loop.batches_seen))


def same_when_resumed(fit, folder, moments):
    """Fit without a stop, and again from each of some moments on; whether the weights are the same to the bit.

    Args:
        fit: Takes ``callbacks`` and ``ckpt_path``, and returns the weights by name.
        folder: For checkpoints.
        moments: Numbers of batches.
    """
    whole = fit(callbacks=[Saves(folder, moments)])
    resumed = {moment: fit(ckpt_path=folder / str(moment)) for moment in moments}
    return {
        moment: all(torch.equal(weights[name], whole[name]) for name in whole) for moment, weights in resumed.items()
    }
