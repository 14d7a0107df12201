"""What the command line of a training program names: a module, data, and what they consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, DataModule, TrainModule
from dstrat.cli import LRSchedulerCallable, OptimizerCallable, instantiate_class


class Backbone(nn.Module):
    """Layers.

    Args:
        width: Features of the hidden layer.
    """

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x)


class Net(TrainModule):
    """A small network.

    Args:
        backbone: Its layers.
        lr: The step size of plain gradient descent.
        batch_size: How many numbers a batch has.
    """

    def __init__(self, backbone: Backbone | None = None, lr: float = 0.1, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="backbone")
        self.first_random = torch.rand(()).item()
        self.backbone = backbone or Backbone()
        self.lr, self.batch_size = lr, batch_size

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.backbone(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.backbone(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.backbone(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WithOptimizers(Net):
    """A network that gets its optimizer and scheduler.

    Args:
        optimizer: Makes the optimizer.
        scheduler: Makes the scheduler.
    """

    def __init__(self, optimizer: OptimizerCallable = torch.optim.SGD, scheduler: LRSchedulerCallable | None = None):
        super().__init__()
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return optimizer if self.make_scheduler is None else ([optimizer], [self.make_scheduler(optimizer)])


class WithLinkedOptimizer(Net):
    """A network that gets class and arguments of its optimizer.

    Args:
        optimizer: Both.
    """

    def __init__(self, optimizer: dict[str, Any]) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self):
        return instantiate_class(self.parameters(), self.optimizer)


class Untyped(Net):
    def __init__(self, width, lr=0.1):
        super().__init__(Backbone(width), lr)


class Failing(Net):
    def __init__(self, width: int = 3):
        super().__init__()
        raise RuntimeError(f"{width} are too many")


class Numbers(DataModule):
    """Numbers.

    Args:
        size: How many there are.
        batch_size: How many a batch has.
    """

    def __init__(self, size: int = 16, batch_size: int = 4) -> None:
        self.size, self.batch_size = size, batch_size
        self.num_features = 2

    def _loader(self):
        x = torch.rand(self.size, 2, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


class Notes(Callback):
    """A callback of the user's own.

    Args:
        text: What it notes.
    """

    def __init__(self, text: str = "none") -> None:
        self.text = text


def make_net(width: int = 7) -> Net:
    """Return a network.

    Args:
        width: Features of its hidden layer.
    """
    return Net(Backbone(width))
