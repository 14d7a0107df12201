"""A program of a Lightning user, trained by either Trainer: python net.py lightning|dstrat STRATEGY OUTPUT."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def classes(pl):
    """Return a module, a data module and a callback of one of Lightning's two libraries."""

    class Net(pl.LightningModule):
        def __init__(self, lr=0.05, dropout=0.2):
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))
            self.losses = []

        def forward(self, x):
            return self.layers(x)

        def training_step(self, batch, batch_idx):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    class Data(pl.LightningDataModule):
        def __init__(self, samples=64):
            super().__init__()
            self.save_hyperparameters()

        def setup(self, stage):
            x = torch.randn(self.hparams.samples, 8, generator=torch.Generator().manual_seed(1))
            self.dataset = TensorDataset(x, x.sum(1, keepdim=True))

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=8, shuffle=True)

        def val_dataloader(self):
            return DataLoader(self.dataset, batch_size=8)

    class Steps(pl.Callback):
        def __init__(self):
            self.steps, self.val_losses = [], []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.steps.append(trainer.global_step)

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.val_losses.append(float(trainer.callback_metrics["val_loss"]))

    for cls in (Net, Data, Steps):
        cls.__qualname__ = cls.__name__
    return Net, Data, Steps


def unshuffled(data):
    data.setup("fit")
    return DataLoader(data.dataset, batch_size=8)


def main(which, strategy, output):
    pl = importlib.import_module("lightning.pytorch")
    if strategy.startswith("dstrat_"):
        importlib.import_module("dstrat_lightning")
    Trainer = pl.Trainer if which == "lightning" else importlib.import_module("dstrat").Trainer  # noqa: N806 - a class
    net, data, steps = classes(pl)
    pl.seed_everything(3, verbose=False)
    counted, best = steps(), pl.callbacks.ModelCheckpoint(Path(output).with_suffix(""), monitor="val_loss")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=1.0,
        callbacks=[counted, best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = net()
    trainer.fit(module, datamodule=data())
    if trainer.global_rank == 0:
        seen = {
            "losses": module.losses,
            "steps": counted.steps,
            "val_losses": sorted(counted.val_losses),
            "best": best.best_model_path,
            "score": float(best.best_model_score),
        }
        Path(output).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
