"""Models of benchmarks/choose.py, and what its ranks run."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dstrat
from dstrat import OwnLoop, Pipeline
from dstrat.cli.measure.benchmarks import measure
from dstrat.parallel.strategy import ParallelStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from dstrat.cli.measure.machine import Machine
    from dstrat.testing.ranks.team import RankContext

WARM_UP, STEPS = 2, 4
MMAP_THRESHOLD = -3  # of mallopt


class Wide(nn.Module):
    """Blocks of two square layers, which return the loss.

    Attributes:
        device_mesh: The mesh whose dimension ``tp`` splits the layers; None for none.
    """

    device_mesh: DeviceMesh | None = None
    plan: ClassVar[dict[str, ParallelStyle]] = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.block(width) for _ in range(layers // 2)))

    def block(self, width: int) -> nn.Module:
        """Return a block."""
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the output."""
        return mean_square(self.layers(x))

    def configure_model(self) -> None:
        """Split the matrices of each block."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["tp"]
            for block in self.layers:
                parallelize_module(block, mesh, self.plan)

    def configure_pipeline(self) -> Pipeline:
        """Return the blocks in order."""
        return Pipeline(model=self.layers, loss=lambda output, _: mean_square(output))


class Attention(nn.Module):
    """Attention and two layers, with residual connections."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.head_size = width // heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys, self.values, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sums, of the same shape."""
        normed = self.first_norm(x)
        heads = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))
        return out


class Transformer(Wide):
    """Blocks of an encoder."""

    plan: ClassVar[dict[str, ParallelStyle]] = {
        **dict.fromkeys(("queries", "keys", "values", "up"), ColwiseParallel()),
        **dict.fromkeys(("output", "down"), RowwiseParallel()),
    }

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__(width, 2 * blocks)

    def block(self, width: int) -> nn.Module:
        return Attention(width)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    """Return the mean square."""
    return output.square().mean()


def transformer() -> tuple[Wide, torch.Tensor]:
    """Return a model whose products take most of the time."""
    return Transformer(256, 4), torch.ones(8, 64, 256)


def wide() -> tuple[Wide, torch.Tensor]:
    """Return a model of many parameters and few samples."""
    return Wide(1024, 8), torch.ones(8, 1024)


def deep() -> tuple[Wide, torch.Tensor]:
    """Return a model of small layers and many samples."""
    return Wide(256, 16), torch.ones(512, 256)


def large_transformer() -> tuple[Wide, torch.Tensor]:
    """Return a model whose activations take as much as its parameters."""
    return Transformer(768, 6), torch.ones(8, 128, 768)


def large_wide() -> tuple[Wide, torch.Tensor]:
    """Return a model of 50 million parameters."""
    return Wide(2048, 12), torch.ones(256, 2048)


MODELS = {"transformer": transformer, "wide": wide, "deep": deep}
LARGE_MODELS = {"large_transformer": large_transformer, "large_wide": large_wide}


def launch(context: RankContext, strategy: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a rank that exists already, with one thread."""
    torch.set_num_threads(1)
    built = dstrat.build(
        strategy=strategy, accelerator="cpu", devices=context.cluster.world_size, plugins=[context.cluster]
    )
    return OwnLoop(built).launch(function, *arguments)


def measure_machine(context: RankContext) -> Machine:
    """Measure this machine, in a rank."""
    machine: Machine = launch(context, ParallelStrategy(), measure, "this machine")
    return machine


def run(context: RankContext, alias: str, model: str, batch: int) -> tuple[float, float]:
    """Return the measured times of a step, in a rank.

    Args:
        context: The rank.
        alias: The strategy.
        model: Name of the model.
        batch: Size of the batch of the ranks that share one, in batches of the model.
    """
    seconds: tuple[float, float] = launch(context, alias, train, model, batch)
    return seconds


def train(loop: OwnLoop, model: str, batch: int) -> tuple[float, float]:
    """Return the shortest wall time and processor time of a step in seconds."""
    module, samples = MODELS[model]()
    samples = torch.cat([samples] * batch)
    split(loop, module)
    loop.setup(module, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4))
    times = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter(), time.process_time()
        loop.backward(loop.compute(module, samples))
        loop.step()
        times.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    wall, processor = zip(*times[WARM_UP:], strict=True)
    return min(wall), min(processor)


def split(loop: OwnLoop, module: Wide) -> None:
    """Split the layers of a module where the strategy does so."""
    strategy: Any = loop.strategy
    if getattr(strategy, "tensor_parallel_size", 1) > 1:
        module.device_mesh = strategy.device_mesh
    module.configure_model()


def largest_memory(context: RankContext, alias: str, model: str, batch: int) -> int:
    """Return the bytes that training needs at its peak, in a new rank."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 65536)  # memory that is freed goes back to the system
    size: int = launch(context, alias, train_large, model, batch)
    return size


def train_small_layer() -> None:
    """Take a step of everything that the models have."""
    layer = Transformer(8, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 2, 8)).backward()
    optimizer.step()


def train_large(loop: OwnLoop, model: str, batch: int) -> int:
    """Return the largest resident memory in steps after the first one, above that before there was a model."""
    train_small_layer()  # loads modules and kernels, which take up to 100 MiB
    before = resident("VmRSS")
    with loop.strategy.model_sharded_context():
        module, samples = LARGE_MODELS[model]()
        split(loop, module)
    samples = torch.cat([samples] * batch)
    loop.setup(module, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4))
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        loop.backward(loop.compute(module, samples))
        loop.step()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    """Return what this process has in memory (VmRSS), or had at most (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
