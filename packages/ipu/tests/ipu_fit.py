"""A small module, its data, and fits of it whose losses, weights and counters tests compare."""

from __future__ import annotations

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
ON_IPU = {"accelerator": "ipu", "devices": 1}


class Regression(TrainModule):
    """Learns a sum; its losses come with the outputs of each call."""

    def __init__(self, *, dropout=0.0, normalizes=False, optimizer="AdamW", scheduled=False, **options):
        super().__init__()
        norm = nn.BatchNorm1d(32) if normalizes else nn.ReLU()
        self.net = nn.Sequential(nn.Linear(16, 32), norm, nn.Dropout(dropout), nn.Linear(32, 1))
        self.optimizer, self.options, self.scheduled, self.losses = optimizer, options, scheduled, []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        loss = outputs["loss"]
        self.losses.extend(loss.reshape(-1).tolist())

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), **{"lr": 0.01, **self.options})
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.scheduled}}


def data(samples=160, *, batch_size=8, shuffle=True):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, 16, generator=generator)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def make_trainer(**arguments):
    return Trainer(**{**QUIET, **ON_IPU, "max_epochs": 1, **arguments})


def fit(module=None, loader=None, *, val=None, ckpt_path=None, **arguments):
    """Fit; return the module and the Trainer."""
    seed_everything(3, verbose=False)
    module = Regression() if module is None else module() if isinstance(module, type) else module
    trainer = make_trainer(**arguments)
    trainer.fit(module, data() if loader is None else loader, val, ckpt_path=ckpt_path)
    return module, trainer


def made(**options):
    """Return a module whose weights are the same each time."""
    seed_everything(3, verbose=False)
    return Regression(**options)


def state_of(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


class Counting(Callback):
    """Counts what the simulator does, at the end of each batch."""

    def __init__(self, simulator):
        self.simulator, self.batches = simulator, []

    def on_train_start(self, trainer, module):
        self.start = self.simulator.counts.copy()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append(self.simulator.counts.since(self.start))

    def on_train_end(self, trainer, module):
        self.end = self.simulator.counts.since(self.start)
