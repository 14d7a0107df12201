"""A tiny training of one step, by dstrat or by hand, whose ranks write when the step is done.

``scaling_start.py dstrat RANKS OUT`` starts its ranks itself, and torchrun starts ``scaling_start.py hand RANKS OUT``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset


def with_dstrat(num_ranks: int, out: Path) -> None:
    """Train one step with the Trainer."""
    import dstrat

    class Net(dstrat.TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:  # noqa: ARG002
            write(out, self.trainer.global_rank)

    trainer = dstrat.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=num_ranks,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.rand(num_ranks, 4)), batch_size=1))


def by_hand(out: Path) -> None:
    """Train one step with torch alone."""
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.rand(1, 4)).square().mean().backward()
    optimizer.step()
    write(out, torch.distributed.get_rank())
    torch.distributed.destroy_process_group()


def write(out: Path, rank: int) -> None:
    """Write when the first step of a rank is done, and what of the processor it has used."""
    Path(f"{out}.{rank}").write_text(f"{time.time()} {sum(os.times()[:2])}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "dstrat":
        with_dstrat(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        by_hand(Path(sys.argv[3]))
