"""A tiny training of one step with the Trainer, whose ranks write when the step is done.

``scaling_start.py RANKS METHOD OUT`` starts its ranks with one of the start methods.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from scaling_start_by_hand import write
from torch.utils.data import DataLoader, TensorDataset

import dstrat
from dstrat_ddp import DDPStrategy


class Net(dstrat.TrainModule):
    """A linear layer."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.out = out

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean of the squared outputs."""
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        """Write that the step is done."""
        write(self.out, self.trainer.global_rank)


def main(num_ranks: int, start_method: str, out: Path) -> None:
    """Train one step."""
    torch.set_num_threads(1)
    trainer = dstrat.Trainer(
        strategy=DDPStrategy(start_method=start_method),
        accelerator="cpu",
        devices=num_ranks,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(out), DataLoader(TensorDataset(torch.rand(num_ranks, 4)), batch_size=1))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
