"""Models of benchmarks/choose.py, and what its ranks run."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import dstrat
from dstrat import OwnLoop
from dstrat.cli.measure.benchmarks import measure
from dstrat.parallel.strategy import ParallelStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.cli.measure.machine import Machine
    from dstrat.testing.ranks.team import RankContext

RANKS, WARM_UP, STEPS = 2, 2, 4


class Wide(nn.Module):
    """Square layers, which return the loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


class Transformer(Wide):
    """Layers of an encoder."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__(width, 0)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers))
        )


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose products take most of the time."""
    return Transformer(256, 3), torch.ones(8, 64, 256)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of many parameters and few samples."""
    return Wide(1024, 6), torch.ones(8, 1024)


def deep() -> tuple[nn.Module, torch.Tensor]:
    """Return a model of small layers and many samples."""
    return Wide(256, 16), torch.ones(512, 256)


MODELS = {"transformer": transformer, "wide": wide, "deep": deep}


def launch(context: RankContext, strategy: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a rank that exists already, with one thread."""
    torch.set_num_threads(1)
    built = dstrat.build(strategy=strategy, accelerator="cpu", devices=RANKS, plugins=[context.cluster])
    return OwnLoop(built).launch(function, *arguments)


def measure_machine(context: RankContext) -> Machine:
    """Measure this machine, in a rank."""
    machine: Machine = launch(context, ParallelStrategy(), measure, "this machine")
    return machine


def run(context: RankContext, alias: str, model: str) -> tuple[float, float]:
    """Return the measured times of a step, in a rank."""
    seconds: tuple[float, float] = launch(context, alias, train, model)
    return seconds


def train(loop: OwnLoop, model: str) -> tuple[float, float]:
    """Return the median wall time and processor time of a step in seconds."""
    module, batch = MODELS[model]()
    loop.setup(module, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4))
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter(), time.process_time()
        loop.backward(loop.compute(module, batch))
        loop.step()
        times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    wall, processor = zip(*times[WARM_UP:], strict=True)
    return statistics.median(wall), statistics.median(processor)
