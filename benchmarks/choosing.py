"""Memory and processor time of each strategy on the same module, for the table of docs/choose.md.

``python benchmarks/choosing.py`` prints the rows of the table; names of strategies after it measure only these.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

import dstrat

if TYPE_CHECKING:
    from dstrat import OwnLoop

RANKS, GLOBAL_BATCH, WIDTH, BLOCKS = 2, 32, 1024, 6
WARM_UP, STEPS, REPEATS = 2, 6, 3
STRATEGIES = (
    "single_device",
    "ddp",
    "fsdp",
    "fsdp_cpu_offload",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
)


class Block(nn.Module):
    """Two linear maps whose result is added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape, with what this block adds."""
        out: Tensor = x + self.down(F.relu(self.up(x)))
        return out


class Net(nn.Module):
    """A stack of blocks: 50 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def loss(self, x: Tensor) -> Tensor:
        """Return a loss that needs all blocks."""
        return F.mse_loss(self.blocks(x), x.roll(1, dims=1))


def train(loop: OwnLoop) -> None:
    """Train in each process of the job, and print what it took on rank 0."""
    strategy = loop.strategy
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports what the first optimizer imports
    before = memory("VmRSS")
    with strategy.model_sharded_context():
        net = Net()
    loop.setup(net, lambda net: torch.optim.AdamW(net.parameters(), lr=1e-4))
    batch = torch.randn(GLOBAL_BATCH // strategy.world_size, WIDTH)
    seconds = []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    for _ in range(WARM_UP + STEPS):
        start = time.process_time()
        loop.backward(loop.compute(net.loss, batch))
        loop.step()
        seconds.append(time.process_time() - start)
    took = torch.tensor([memory("VmHWM") - before, statistics.median(seconds[WARM_UP:])])
    took = strategy.reduce(took, reduce_op="max")
    if strategy.is_global_zero:
        print(json.dumps(took.tolist()))


def memory(name: str) -> float:
    """Return what this process has in memory (VmRSS), or had at most (VmHWM), in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure(strategy: str) -> list[float]:
    """Return peak memory in the steps (MiB) and processor time of one (s), the largest of all ranks, of one job."""
    command = [sys.executable, __file__, "--rank", strategy]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is not kept for later
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True, env=env)
    result: list[float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure all strategies in turn, and print the table; or be a job of one strategy."""
    if sys.argv[1:2] == ["--rank"]:
        torch.set_num_threads(1)
        devices: Any = 1 if sys.argv[2] == "single_device" else RANKS
        dstrat.OwnLoop(dstrat.build(strategy=sys.argv[2], accelerator="cpu", devices=devices)).launch(train)
        return
    strategies = sys.argv[1:] or STRATEGIES
    samples: dict[str, list[list[float]]] = {strategy: [] for strategy in strategies}
    for _ in range(REPEATS):
        for strategy in strategies:
            samples[strategy].append(measure(strategy))
    print("| strategy | memory of a rank, MiB | processor time of a step and rank, s |")
    print("|---|---|---|")
    for strategy, took in samples.items():
        memory, seconds = (statistics.median(values) for values in zip(*took, strict=True))
        print(f"| `{strategy}` | {memory:.0f} | {seconds:.2f} |")


if __name__ == "__main__":
    main()
