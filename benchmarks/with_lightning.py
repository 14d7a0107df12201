"""The same training with Lightning, in an environment that has it."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import lightning
from torch.utils.data import DataLoader
from workload import Task, loss_of, make_optimizer, read_task

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    """The network and how it is trained."""

    def __init__(self, task: Task, on_step: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.task = task
        self.network = task.network(on_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
        """Return the loss."""
        return loss_of(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return make_optimizer(self.task.optimizer, self.network)


def train(task: Task, devices: int, on_step: Callable[[int], None] | None = None) -> None:
    """Train with the strategy ddp on so many CPU processes."""
    trainer = lightning.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(task.dataset(devices), batch_size=task.workload.batch_size, shuffle=True)
    trainer.fit(Module(task, on_step), loader)


if __name__ == "__main__":
    task, options = read_task()
    train(task, options.devices)
