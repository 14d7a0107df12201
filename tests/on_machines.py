"""Rank of a job on several machines, as torchrun starts it: ``on_machines.py STRATEGY RANKS PORT RANK ATTEMPT EPOCHS``.

``RANKS`` is the number of ranks of each machine, such as ``1,1,1``.  Each machine has a folder as its memory.
"""

import os
import sys
from pathlib import Path

import torch
from tests.recovering import Diary, Net, Numbers
from torch.utils.data import DataLoader

import dstrat.strategies
from dstrat import InMemoryCheckpoint, ModelCheckpoint, Trainer

NUM_SAMPLES = 240


def describe_rank(ranks, port, rank, attempt):
    """Set what torchrun sets."""
    machine = next(machine for machine in range(len(ranks)) if rank < sum(ranks[: machine + 1]))
    os.environ |= {
        "WORLD_SIZE": str(sum(ranks)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - sum(ranks[:machine])),
        "LOCAL_WORLD_SIZE": str(ranks[machine]),
        "GROUP_RANK": str(machine),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "one-job",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "DSTRAT_MEMORY_DIR": str(Path(f"memory-{machine}").absolute()),
    }
    Path(os.environ["DSTRAT_MEMORY_DIR"]).mkdir(exist_ok=True)


def main(strategy, ranks, port, rank, attempt, num_epochs):
    ranks = [int(count) for count in ranks.split(",")]
    describe_rank(ranks, port, int(rank), int(attempt))
    train(strategy, ranks, int(attempt), int(num_epochs))


def train(strategy, ranks, attempt, num_epochs):
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks[0],
        num_nodes=len(ranks),
        strategy=getattr(dstrat.strategies, strategy)(),
        max_epochs=num_epochs,
        logger=False,
        default_root_dir=".",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5), Diary(attempt)],
    )
    data = DataLoader(Numbers(NUM_SAMPLES), batch_size=12 // sum(ranks), shuffle=True)
    trainer.fit(Net(), data, resume="auto")


if __name__ == "__main__":
    main(*sys.argv[1:])
