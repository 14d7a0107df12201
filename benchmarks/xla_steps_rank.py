"""A process that trains on XLA devices in turn by hand and with dstrat, and times each in its steady state."""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch_xla
from torch.utils.data import DataLoader
from torch_xla import runtime
from torch_xla.core import xla_model
from torch_xla.distributed import spmd
from with_dstrat import Module
from workload import Clock, Task, Workload, loss_of, make_optimizer

from dstrat import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP = 10
"""Steps before the time starts."""

WORKLOAD = Workload(features=256, width=256, hidden=3, classes=64, batch_size=32)
"""Of which a step takes 10 to 30 ms."""


class DeviceClock(Clock):
    """Takes the time when the device has run all that was recorded, and that of the main thread.

    Attributes:
        thread_seconds: What the main thread computed.
    """

    def __init__(self, first: int, last: int) -> None:
        super().__init__(first, last)
        self._ends = (first, last)
        self.thread_seconds = 0.0

    def __call__(self, step: int) -> None:
        """Take note of a step's beginning."""
        if step in self._ends:
            xla_model.wait_device_ops()
            self.thread_seconds = time.thread_time() - self.thread_seconds
        super().__call__(step)


def main() -> None:
    """Measure, and write steps per second and milliseconds of computing per step of each arm and repeat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    if options.devices > 1:
        runtime.use_spmd()
    torch_xla.device()  # before the first backward pass
    task = Task(workload=WORKLOAD, steps=WARMUP + options.steps + 1)
    # The second one by hand shows how far apart two equal arms are: what is less than that is noise.
    arms = {"by hand": train_by_hand, "by hand again": train_by_hand, "dstrat": train_with_dstrat}
    samples: dict[str, dict[str, list[float]]] = {"steps/s": {}, "cpu": {}, "recording": {}}
    order = random.Random(0)
    for repeat in range(options.repeats + 1):
        names = list(arms)
        order.shuffle(names)
        for name in names:
            clock = DeviceClock(WARMUP, WARMUP + options.steps)
            arms[name](task, options.devices, clock)
            gc.collect()
            if repeat:  # the first round only compiles what the others find compiled
                samples["steps/s"].setdefault(name, []).append(options.steps / clock.seconds)
                samples["cpu"].setdefault(name, []).append(1000 * clock.cpu_seconds / options.steps)
                samples["recording"].setdefault(name, []).append(1000 * clock.thread_seconds / options.steps)
    options.out.write_text(json.dumps(samples))


def train_by_hand(task: Task, devices: int, on_step: Callable[[int], None]) -> None:
    """Train as torch_xla's documentation does."""
    device = torch_xla.device()
    mesh = spmd.Mesh(list(range(devices)), (devices,), ("data",)) if devices > 1 else None
    model = task.network(on_step).to(device)
    optimizer = make_optimizer(task.optimizer, model)
    model.train()
    for batch in loader_of(task):
        with torch_xla.step():
            inputs, targets = (tensor.to(device) for tensor in batch)
            if mesh is not None:
                spmd.mark_sharding(inputs, mesh, ("data", None))
                spmd.mark_sharding(targets, mesh, ("data",))
            optimizer.zero_grad()
            loss_of(model, [inputs, targets]).backward()
            optimizer.step()


def train_with_dstrat(task: Task, devices: int, on_step: Callable[[int], None]) -> None:
    """Train with the strategy for so many devices."""
    trainer = Trainer(
        strategy="xla_spmd" if devices > 1 else "single_xla",
        accelerator="xla",
        devices=devices,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(task, on_step), loader_of(task))


def loader_of(task: Task) -> DataLoader[Any]:
    """Return a loader of the task's data."""
    return DataLoader(task.dataset(1), batch_size=task.workload.batch_size, shuffle=True)


if __name__ == "__main__":
    main()
