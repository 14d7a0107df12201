"""Measure the memory of activations that layers save, beside its estimate, and the time of a step.

For example::

    python benchmarks/activations.py
    DSTRAT_SIMULATED_GPUS=1 python benchmarks/activations.py --device simgpu

A step of a transformer runs on the CPU, where the storages that live are counted after each operation; or on a
simulated GPU, whose memory can be measured and whose time means nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dstrat.builtin.precision.true import TruePrecision
from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training
from dstrat.cli.estimate.live_memory import LiveMemory
from dstrat.parallel.activation_memory import ActivationMemory

WIDTH, LENGTH, BATCH, BLOCKS, HEADS = 512, 256, 4, 8, 8
WAYS: dict[str, ActivationMemory | None] = {
    "everything saved": None,
    '"selective"': ActivationMemory(recomputation="selective"),
    '"full"': ActivationMemory(recomputation="full"),
    "offload": ActivationMemory(offloads=True),
    '"selective", offload': ActivationMemory(recomputation="selective", offloads=True),
    '"full", offload': ActivationMemory(recomputation="full", offloads=True),
}
MIB = 2**20
SIMULATED: list[str] = []
"""The type of simulated device, if the step runs on one."""


class Block(nn.Module):
    """A block of a transformer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention and a perceptron."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (one.view(shape).transpose(1, 2) for one in self.heads(self.first_norm(x)).chunk(3, -1))
        with ExitStack() as stack:
            if SIMULATED:  # which has no fused kernel
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Net(nn.Module):
    """Blocks, and a loss of their output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "simgpu"))
    device_type = parser.parse_args().device
    if device_type == "simgpu":
        SIMULATED.append(device_type)
        from dstrat.testing import simulated_gpu

        simulated_gpu.load()
    device = torch.device(device_type)
    columns = ("layers save", "estimate, MiB", "measured, MiB", "of it", "host, MiB", "ms of a step", "of it")
    table = Table(*columns)
    first: tuple[float, float] | None = None
    for name, memory in WAYS.items():
        if device.type == "cpu" and memory is not None and memory.offloads:
            continue
        size = estimated(memory, "cpu" if device.type == "cpu" else "cuda")
        bytes_measured, seconds = measured(memory, device)
        first = first or (bytes_measured, seconds)
        table.add_row(
            name,
            f"{size.activations / MIB:.1f}",
            f"{bytes_measured / MIB:.1f}",
            f"{bytes_measured / first[0]:.2f}",
            f"{size.offloaded_activations / MIB:.1f}",
            f"{1000 * seconds:.0f}",
            f"{seconds / first[1]:.2f}",
        )
    Console(width=120).print(table)


def estimated(memory: ActivationMemory | None, device_type: str) -> Any:
    """Return the sizes of a training on fake tensors."""

    def make() -> TrainingSetup:
        batch = torch.zeros(BATCH, LENGTH, WIDTH)
        return TrainingSetup(module=Net(), batch=batch, make_optimizers=lambda net: torch.optim.SGD(net.parameters()))

    return measure_training(
        make, TruePrecision(), device_type=device_type, world_size=1, ranks_per_machine=1, saved_activations=memory
    )


def measured(memory: ActivationMemory | None, device: torch.device) -> tuple[int, float]:
    """Return the largest memory of activations in a step, and the median of its time."""
    net = Net().to(device)
    if memory is not None:
        memory.select(net, device, has_streams=device.type != "cpu")()
    batch = torch.randn(BATCH, LENGTH, WIDTH, device=device)
    times = []
    for _ in range(1 if SIMULATED else 7):
        net.zero_grad()
        began = time.perf_counter()
        net(batch).backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return largest(net, batch, device), statistics.median(times[-5:])


def largest(net: Net, batch: Tensor, device: torch.device) -> int:
    """Return the largest memory of activations in a step, with the batch and without gradients of parameters."""
    net.zero_grad(set_to_none=True)
    if device.type == "cpu":
        live = LiveMemory([*net.parameters(), *net.buffers()])
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(live.count_gradient)
        with live:
            live.begin_step(batch)
            net(batch).backward()
        return max(activations for activations, _ in live.timeline)
    module = torch.get_device_module(device)
    for parameter in net.parameters():  # so that the peak is that of activations
        parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    before = module.memory_allocated() - batch.nbytes
    module.reset_peak_memory_stats()
    net(batch).backward()
    return int(module.max_memory_allocated()) - before


if __name__ == "__main__":
    main()
