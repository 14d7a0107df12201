"""A small module, its data, and fits of it on the simulator, whose losses and counters tests compare."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule, seed_everything

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ON_CPU = {"strategy": "single_device", "accelerator": "cpu", "devices": 1}
ON_HPU = {"strategy": "hpu_single", "accelerator": "hpu", "devices": 1}


def counters():
    """What the simulator counts: nothing that the hardware has been seen to do."""
    from habana_frameworks import simulation

    found = simulation.counters()
    return {name: found[name] for name in ("graphs", "compiled", "to_host", "to_device")}


def since(before):
    return {name: value - before[name] for name, value in counters().items()}


class Counting(Callback):
    """Counts at the end of each batch and of each epoch."""

    def __init__(self):
        self.batches, self.epochs, self.operations = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        from habana_frameworks import simulation

        self.batches.append(counters())
        self.operations.append(simulation.counters()["operations"])

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(counters())

    def per_step(self, first, last):
        """What was counted between the ends of two batches."""
        return {name: self.batches[last][name] - self.batches[first][name] for name in self.batches[0]}

    def operations_per_step(self, first, last):
        """How many operations the host recorded between the ends of two batches."""
        return self.operations[last] - self.operations[first]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Regression(TrainModule):
    """Learns a sum; keeps its losses on the device until a test reads them."""

    def __init__(self, *, dropout=0.0, logs=True):
        super().__init__()
        self.first = nn.Linear(16, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(12, 1)
        self.logs, self.losses = logs, []

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.last(x)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        if self.logs:
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data(samples=160, *, batch_size=8, shuffle=False):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size, shuffle=shuffle)


def trainer(**arguments):
    return Trainer(**{**QUIET, **ON_HPU, "max_epochs": 1, **arguments})


def fitted(module=None, loader=None, ckpt_path=None, **arguments):
    """Fit, and return the module."""
    seed_everything(3, verbose=False)
    module = module or Regression()
    trainer(**arguments).fit(module, loader or data(), ckpt_path=ckpt_path)
    return module


def losses_of(module):
    return torch.stack([loss.cpu() for loss in module.losses])


class SavesAt(Callback):
    """Saves a checkpoint after some optimizer steps."""

    saves_checkpoints = True

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not os.path.exists(self.path):  # noqa: PTH110 - a string
            trainer.save_checkpoint(self.path)
