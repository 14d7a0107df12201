"""A tiny training of one step by hand, for torchrun, whose ranks write when the step is done: its argument is where."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch


def main(out: Path) -> None:
    """Train one step with torch alone."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.rand(1, 4)).square().mean().backward()
    optimizer.step()
    write(out, torch.distributed.get_rank())
    torch.distributed.destroy_process_group()


def write(out: Path, rank: int) -> None:
    """Write when the first step of a rank is done, and what of the processor it has used."""
    Path(f"{out}.{rank}").write_text(f"{time.time()} {sum(os.times()[:2])}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
