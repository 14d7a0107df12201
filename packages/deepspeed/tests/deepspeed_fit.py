"""A fit with a Trainer, on one device or in a rank of several, whose losses can be compared."""

import torch
from deepspeed_loop import Net
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

BATCH, SAMPLES = 12, 48


class Model(TrainModule):
    """A small network, trained by the mean squared error."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Losses(Callback):
    """Takes note of the global loss of each batch."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.found.append(float(trainer.strategy.reduce(outputs["loss"])))


def trainer_of(strategy, cluster=None, *, callbacks=(), plugins=(), **options):
    """Return a Trainer that prints and writes nothing by itself."""
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
        False,
    )
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if cluster is None else cluster.world_size,
        plugins=[PortableCheckpointIO(), *plugins, *([] if cluster is None else [cluster])],
        callbacks=list(callbacks),
        **{"max_epochs": 1} | quiet | options,
    )


def loader(world_size=1):
    """Return batches that are the same ones for any number of ranks, which divide them."""
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:]), batch_size=BATCH // world_size)


def fit(module, strategy, cluster=None, *, ckpt_path=None, callbacks=(), **options):
    """Train; return the global losses."""
    losses = Losses()
    trainer = trainer_of(strategy, cluster, callbacks=[losses, *callbacks], **options)
    trainer.fit(module, loader(trainer.world_size), ckpt_path=ckpt_path)
    return losses.found
