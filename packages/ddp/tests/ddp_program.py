"""Training through the Trainer, and writing what came of it, as a user's script would."""

import json
import os
from pathlib import Path

import torch
from tests.hand_loop import Net
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

BATCH = 8
STEPS = 10


class Model(TrainModule):
    def __init__(self, fails_on, unused):
        super().__init__()
        self.net = Net()
        self.unused = nn.Linear(2, 2) if unused else None
        self.fails_on = fails_on

    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == self.fails_on:
            raise ValueError(f"rank {self.global_rank} had enough")
        return self.net.training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net.validation_step(batch, batch_idx))

    def configure_optimizers(self):
        return self.net.configure_optimizers()


class Losses(Callback):
    """Writes the global loss of each batch, and who was there."""

    def __init__(self, path):
        self.path = path
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"]
        self.losses.append(float(trainer.strategy.reduce(loss.detach())))

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            found = {"losses": self.losses, "world_size": trainer.world_size, "model": type(trainer.model).__name__}
            Path(self.path).write_text(json.dumps(found))


def loader(batch_size):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * STEPS, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:]), batch_size=batch_size)


def run(out, name, devices, fails_on=None, unused=False, callbacks=(), **arguments):
    """Fit and validate; write the weights that came back."""
    model = Model(fails_on, unused)
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        callbacks=[Losses(f"{out}/{name}.json"), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=out,
        **arguments,
    )
    try:
        trainer.fit(model, loader(BATCH // devices), loader(BATCH // devices))
    except Exception as error:
        Path(f"{out}/{name}.error.{os.getpid()}").write_text(f"{type(error).__name__}: {error}")
        return
    total = float(sum(parameter.detach().double().sum() for parameter in model.net.parameters()))
    Path(f"{out}/{name}.weights.{trainer.global_rank}").write_text(repr(total))
