"""A training with checkpoints in memory after every second group of steps; prints what the groups of rank 0 cost."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

import dstrat.strategies
from dstrat import Callback, InMemoryCheckpoint, Trainer, TrainModule

sys.path.append(str(Path(__file__).with_name("gpu")))
from gpt import GPT, Shape

EVERY = 10  # steps
ALONE = 10  # checkpoints


class Training(TrainModule):
    """A small GPT with AdamW."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gpt = GPT(shape)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.gpt(batch)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Times of this process at the end of each group of steps, before a checkpoint is saved."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, *_: Any) -> None:
        if trainer.global_step % EVERY == 0:
            self.times.append((time.perf_counter(), time.process_time()))


class EverySecondTime(InMemoryCheckpoint):
    """Checkpoints at the beginning of every second group, then some that are measured alone.

    Args:
        steps: Number of steps of the groups.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(EVERY)
        self.steps = steps
        self.calls: list[float] = []
        self.alone: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        if trainer.global_step >= self.steps:
            assert self._background is not None
            trainer.strategy.barrier()
            begin = time.process_time()
            self._save(trainer)
            self._background.wait()
            self.alone.append(time.process_time() - begin)
        elif trainer.global_step // EVERY % 2 == 0:
            super().on_train_batch_end(trainer, *arguments)

    @override
    def _save(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        super()._save(trainer)
        self.calls.append(time.perf_counter() - begin)


def main() -> None:
    """Train, and print the times of rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--memory", required=True, help="a folder in memory, for several machines")
    options = parser.parse_args()
    if options.nodes > 1:  # each rank is a machine
        folder = Path(options.memory, os.environ["RANK"])
        folder.mkdir(exist_ok=True)
        os.environ |= {"DSTRAT_MEMORY_DIR": str(folder), "GROUP_RANK": os.environ["RANK"]}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torch.manual_seed(0)
    shape = Shape(layers=4, width=options.width, heads=4, vocabulary=2048, context=256, batch_size=options.batch)
    steps = EVERY * (2 * options.pairs + 3)
    clock, checkpoints = Clock(), EverySecondTime(steps)
    trainer = Trainer(
        accelerator="cpu",
        devices=2 // options.nodes,
        num_nodes=options.nodes,
        strategy=getattr(dstrat.strategies, options.strategy)(),
        max_steps=steps + ALONE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.folder,
        callbacks=[clock, checkpoints],
    )
    module = Training(shape)
    data = torch.randint(shape.vocabulary, (2 * (steps + ALONE) * shape.batch_size, shape.context + 1))
    trainer.fit(module, DataLoader(data, batch_size=shape.batch_size))
    if trainer.is_global_zero:
        groups = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(clock.times)]
        # The first times are those after step 10, without a checkpoint.  The first pair of groups takes memory.
        without, saving = groups[2 : 2 * options.pairs + 2 : 2], groups[3 : 2 * options.pairs + 2 : 2]
        print(
            json.dumps(
                {
                    "without": without,
                    "with": saving,
                    "calls": checkpoints.calls[1 : options.pairs + 1],
                    "alone": checkpoints.alone,
                    "parameters": sum(parameter.numel() for parameter in module.parameters()),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
