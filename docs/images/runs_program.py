"""The program whose runs are drawn: a classifier, with the learning rate of its argument."""

import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dstrat import ModelCheckpoint, Trainer, TrainModule


class Net(TrainModule):
    """Two layers that tell the inside of a ball from its outside."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, _):
        time.sleep(0.005)
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        time.sleep(0.005)
        logits = self.layers(batch[0])
        self.log("val_loss", cross_entropy(logits, batch[1]), prog_bar=True)
        self.log("val_acc", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=float(sys.argv[1]))


def loader(size):
    """Return batches of points, shuffled for a training."""
    x = torch.randn(size, 32, generator=torch.Generator().manual_seed(size))
    return DataLoader(
        TensorDataset(x, (x[:, :8].square().sum(1) + x[:, 8] > 8).long()), batch_size=16, shuffle=size > 2048
    )


torch.manual_seed(0)
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=8,
    log_every_n_steps=10,
    profiler="simple",
    enable_model_summary=False,
    callbacks=ModelCheckpoint(monitor="val_loss"),
)
trainer.fit(Net(), loader(8192), loader(2048))
