"""Trains with Muon on one device or in several ranks with shards, and steps larger matrices; prints a line of JSON."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dstrat import Muon
from dstrat.cli.estimate.live_memory import LiveMemory
from dstrat.parallel.internals import RecordedCollectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

STEPS, BATCH = 20, 32
WIDTH, BLOCKS = 256, 6


class Net(nn.Module):
    """A perceptron with residual blocks."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return (x - batch.roll(1, -1)).square().mean()


def of_torch(parameters: Any) -> Optimizer:
    """Return torch's Muon, for matrices only."""
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=0.02)


def of_dstrat(parameters: Any, dtype: torch.dtype) -> Optimizer:
    """Return dstrat's Muon for the same matrices."""
    return Muon([one for one in parameters if one.dim() == 2], lr=0.02, ns_dtype=dtype)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "torch.optim.Muon": of_torch,
    "Muon, bfloat16": functools.partial(of_dstrat, dtype=torch.bfloat16),
    "Muon, float32": functools.partial(of_dstrat, dtype=torch.float32),
}


def losses(make: Callable[[Any], Optimizer], rank: int = 0, world_size: int = 1) -> list[float]:
    """Return the global losses of a training, sharded if there are several ranks."""
    net = Net(32, 3)
    if world_size > 1:
        shard(net)
    optimizer = make(net.parameters())
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        batch = torch.randn(BATCH, 32, generator=generator)[rank::world_size]
        optimizer.zero_grad()
        loss = net.loss(batch)
        loss.backward()
        optimizer.step()
        total = loss.detach()
        if world_size > 1:
            dist.all_reduce(total)
        found.append(total.item() / world_size)
    return found


def shard(net: Net) -> None:
    """Shard the blocks of a network."""
    for block in net.blocks:
        fully_shard(block)


def cost(make: Callable[[Any], Optimizer], world_size: int = 1) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, its largest temporary memory, and the time."""
    net = Net(WIDTH, BLOCKS)
    if world_size > 1:
        shard(net)
    parameters = [one for one in net.parameters() if one.dim() == 2]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = make(parameters)
    optimizer.step()
    optimizer.step()
    recorded = RecordedCollectives()
    with recorded:
        optimizer.step()
    shards = [one.to_local() if isinstance(one, DTensor) else one for one in parameters]
    live = LiveMemory([])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - began)
    with live:
        live.begin_optimizer_step()
        optimizer.step()
    return {
        "sent": sum(one.bytes for one in recorded.collectives),
        "temporary": live.largest_in_optimizer_step(0),
        "matrices": sum(one.nbytes for one in shards),
        "seconds": statistics.median(times),
    }


def main() -> None:
    """Measure one optimizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    make = OPTIMIZERS[parser.parse_args().optimizer]
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    measured = {"losses": losses(make, rank, world_size), **cost(make, world_size)}
    if rank == 0:
        print(json.dumps(measured), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
