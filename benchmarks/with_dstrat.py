"""The same training with dstrat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from workload import Task, loss_of, make_optimizer, read_task

from dstrat import Trainer, TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor


class Module(TrainModule):
    """The network and how it is trained."""

    def __init__(self, task: Task, on_step: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.task = task
        self.network = task.network(on_step)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
        """Return the loss."""
        loss = loss_of(self.network, batch)
        if self.task.losses:
            self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return make_optimizer(self.task.optimizer, self.network)

    def on_train_end(self) -> None:
        """Write the losses where they are: in the rank."""
        self.task.record(self.losses)


def train(task: Task, devices: int, on_step: Callable[[int], None] | None = None, strategy: str = "ddp") -> None:
    """Train with a strategy on so many CPU processes."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(task.dataset(devices), batch_size=task.workload.batch_size, shuffle=not task.losses)
    trainer.fit(Module(task, on_step), loader)


if __name__ == "__main__":
    task, options = read_task()
    train(task, options.devices)
