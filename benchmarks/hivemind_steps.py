"""Time of a local step of dstrat-hivemind over that of a hand-written hivemind loop; CPU, one thread, one peer.

Both arms run in turn in one process, with the same module, data and optimizer::

    .nox/third-party/bin/python benchmarks/hivemind_steps.py --rounds 3 --steps 300
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import Any

import hivemind
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat_hivemind import HivemindStrategy

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
TARGET = 10**9  # never reached: the steps are local
GOAL = 1.05


class Net(TrainModule):
    """A perceptron whose step takes some milliseconds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - the interface's
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Times(Callback):
    """Notes the wall time and processor time at the end of each batch."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:  # noqa: ARG002 - the hook's
        self.note()

    def note(self) -> None:
        """Note the times now."""
        self.wall.append(time.perf_counter())
        self.processor.append(time.thread_time())


def loader(steps: int) -> DataLoader[Any]:
    """Return a loader of as many batches."""
    return DataLoader(TensorDataset(torch.randn(32 * steps, 64), torch.randn(32 * steps, 1)), batch_size=32)


def by_hand(net: Net, steps: int) -> Times:
    """Train by hand."""
    times = Times()
    dht = hivemind.DHT(start=True, host_maddrs=LOOPBACK)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="by_hand",
        target_batch_size=TARGET,
        batch_size_per_step=32,
        optimizer=net.configure_optimizers(),
        matchmaking_time=5.0,
        averaging_timeout=30.0,
    )
    for index, batch in enumerate(loader(steps)):
        optimizer.zero_grad()
        net.training_step(batch, index).backward()
        optimizer.step()
        times.note()
    optimizer.shutdown()
    dht.shutdown()
    return times


def with_dstrat(net: Net, steps: int) -> Times:
    """Train with the Trainer."""
    times = Times()
    trainer = Trainer(
        strategy=HivemindStrategy(TARGET, run_id="dstrat", host_maddrs=LOOPBACK),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(net, loader(steps))
    return times


def differences(times: list[float]) -> list[float]:
    """Return the milliseconds between the times, without the first ten."""
    return [1000 * (after - before) for before, after in pairwise(times[10:])]


def main() -> None:
    """Run the arms in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arms = {"by hand": by_hand, "dstrat": with_dstrat}
    samples: dict[str, dict[str, list[float]]] = {clock: {arm: [] for arm in arms} for clock in ("wall", "processor")}
    for _ in range(arguments.rounds):
        for arm, train in arms.items():
            times = train(Net(arguments.width), arguments.steps)
            samples["wall"][arm] += differences(times.wall)
            samples["processor"][arm] += differences(times.processor)
    for clock, of_arms in samples.items():
        medians = {arm: statistics.median(values) for arm, values in of_arms.items()}
        ratio = medians["dstrat"] / medians["by hand"]
        print(
            f"{clock} time of a local step, medians: by hand {medians['by hand']:.3f} ms, "
            f"dstrat {medians['dstrat']:.3f} ms, ratio {ratio:.3f} (goal {GOAL})"
        )


if __name__ == "__main__":
    main()
