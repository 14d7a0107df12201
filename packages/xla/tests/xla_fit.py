"""A small module, its data, and fits of it whose losses, parameters and XLA counters tests compare."""

from __future__ import annotations

import dataclasses

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
ON_XLA = {"strategy": "single_xla", "accelerator": "xla", "devices": 1}


@dataclasses.dataclass
class Counts:
    """How often XLA has compiled, run and been cut, and copied values to the host."""

    compiled: int
    executed: int
    cut: int
    copied: int

    @classmethod
    def now(cls):
        from torch_xla.core import xla_model
        from torch_xla.debug import metrics

        xla_model.wait_device_ops()  # graphs count when they have run
        timed = [metrics.metric_data(name) for name in ("CompileTime", "ExecuteTime", "TransferFromDeviceTime")]
        compiled, executed, copied = [data[0] if data else 0 for data in timed]
        return cls(compiled, executed, metrics.counter_value("MarkStep") or 0, copied)

    def since(self, other):
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Counts(*(mine - theirs for mine, theirs in pairs))


class Counting(Callback):
    """Counts at the end of each epoch and of each batch."""

    def __init__(self):
        self.epochs, self.batches = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(Counts.now())

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(Counts.now())


class Saving(Callback):
    """Saves a checkpoint when training ends."""

    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint(self.path)


class Regression(TrainModule):
    """Learns a sum; keeps its losses on the device until a test reads them."""

    def __init__(self, *, dropout=0.0, normalizes=False, scheduled=False):
        super().__init__()
        norm = [nn.BatchNorm1d(32)] if normalizes else []
        self.net = nn.Sequential(nn.Linear(16, 32), *norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))
        self.scheduled, self.losses = scheduled, []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def data(samples=160, *, workers=0, batch_size=8, shuffle=True):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=workers)


def trainer(**arguments):
    return Trainer(**{**QUIET, **ON_XLA, "max_epochs": 1, **arguments})


def losses_of(module=None, loader=None, **arguments):
    """Fit, and return the loss of each batch."""
    seed_everything(3, verbose=False)
    module = module or Regression()
    trainer(**arguments).fit(module, loader or data())
    return torch.stack([loss.cpu() for loss in module.losses])
