"""What all arms of a measurement train: the same network, data and optimizer, written once."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Size of a training.

    Attributes:
        features: Numbers in a sample.
        width: Of the hidden layers.
        hidden: Number of further hidden layers.
        classes: Number of classes.
        batch_size: Samples in a batch of one rank.
    """

    features: int
    width: int
    hidden: int
    classes: int
    batch_size: int


WORKLOADS = {
    "mlp": Workload(features=512, width=1024, hidden=2, classes=512, batch_size=64),  # 3.1 million parameters
    "tiny": Workload(features=32, width=64, hidden=0, classes=8, batch_size=8),
}


class Net(nn.Module):
    """The network.

    Args:
        workload: Its size.
        on_step: Called with the number of earlier calls whenever the network is called; how all arms are timed alike.
    """

    def __init__(self, workload: Workload, on_step: Callable[[int], None]) -> None:
        super().__init__()
        width = workload.width
        hidden = [layer for _ in range(workload.hidden) for layer in (nn.Linear(width, width), nn.ReLU())]
        first, last = nn.Linear(workload.features, width), nn.Linear(width, workload.classes)
        self.layers = nn.Sequential(first, nn.ReLU(), *hidden, last)
        self._on_step = on_step
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        self._on_step(self._calls)
        self._calls += 1
        logits: Tensor = self.layers(x)
        return logits


def make_dataset(workload: Workload, samples: int) -> TensorDataset:
    """Return random samples, the same in every process."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(samples, workload.features, generator=random)
    return TensorDataset(x, torch.randint(workload.classes, (samples,), generator=random))


def loss_of(network: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the loss of a batch."""
    x, y = batch
    return F.cross_entropy(network(x), y)


def make_optimizer(name: str, network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of that name."""
    if name == "sgd":
        return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(network.parameters(), lr=1e-3)


class Clock:
    """Takes the time from one step to a later one.

    Args:
        first: Index of the step at whose beginning the time starts.
        last: Index of the step at whose beginning it ends.

    Attributes:
        seconds: What the steps took.
        cpu_seconds: What this process computed in them, all of its threads together.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.seconds = self.cpu_seconds = 0.0

    def __call__(self, step: int) -> None:
        """Take note of a step's beginning."""
        if step == self._first:
            self.seconds, self.cpu_seconds = -time.perf_counter(), -time.process_time()
        elif step == self._last:
            self.seconds += time.perf_counter()
            self.cpu_seconds += time.process_time()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a program that trains is asked to do.

    Attributes:
        workload: Size of the training.
        steps: Optimizer steps.
        optimizer: ``"adamw"`` or ``"sgd"``.
        losses: Where each rank writes its losses, followed by its number; None does not.
        fault: What goes wrong in the middle; None is nothing.
        fault_time: Where the failing rank writes when it does.
    """

    workload: Workload
    steps: int
    optimizer: str = "adamw"
    losses: str | None = None
    fault: str | None = None
    fault_time: str | None = None

    def dataset(self, world_size: int) -> TensorDataset:
        """Return as many samples as there are for the steps."""
        return make_dataset(self.workload, self.steps * self.workload.batch_size * world_size)

    def network(self, on_step: Callable[[int], None] | None = None) -> Net:
        """Return the network, with the same weights in every arm."""
        from faults import fault_on_step

        torch.manual_seed(0)
        if on_step is None and self.fault:
            on_step = fault_on_step(self.fault, self.fault_time)
        return Net(self.workload, on_step or _nothing)

    def record(self, losses: list[Tensor]) -> None:
        """Write the losses of this rank, if that is asked for."""
        if self.losses:
            rank = os.environ.get("RANK", "0")
            Path(f"{self.losses}{rank}.json").write_text(json.dumps([float(loss) for loss in losses]))


def _nothing(step: int) -> None:
    del step


def read_task() -> tuple[Task, argparse.Namespace]:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="mlp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
    parser.add_argument("--losses")
    parser.add_argument("--fault")
    parser.add_argument("--fault-time")
    options = parser.parse_args()
    import dataclasses

    workload = WORKLOADS[options.workload]
    if options.batch_size:
        workload = dataclasses.replace(workload, batch_size=options.batch_size)
    task = Task(
        workload=workload,
        steps=options.steps,
        optimizer=options.optimizer,
        losses=options.losses,
        fault=options.fault,
        fault_time=options.fault_time,
    )
    return task, options
