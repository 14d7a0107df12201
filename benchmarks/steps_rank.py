"""One rank that trains in turn by hand, with dstrat and with Lightning, and times each in its steady state.

All arms run in the same processes, one right after the other, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import by_hand
import torch.distributed as dist
import with_dstrat
from workload import WORKLOADS, Clock, Task

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP = 10
"""Steps before the time starts."""

Arm = tuple[str, "Callable[[Task, Clock], None]"]


def main() -> None:
    """Measure, and let rank 0 write steps per second and milliseconds of computing per step of each arm and repeat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategies", nargs="+", help="compare these, instead of ddp with a loop by hand")
    options = parser.parse_args()

    task = Task(workload=WORKLOADS[options.workload], steps=WARMUP + options.steps + 1)
    samples: dict[str, dict[str, list[float]]] = {"steps/s": {}, "cpu": {}}
    order = random.Random(0)  # the same in both ranks
    for repeat in range(options.repeats + 1):
        found = strategy_arms(options.strategies) if options.strategies else arms(options.out, repeat)
        order.shuffle(found)
        for name, train in found:
            clock = Clock(WARMUP, WARMUP + options.steps)
            train(task, clock)
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
            if repeat:  # the first round only loads what the others find loaded
                samples["steps/s"].setdefault(name, []).append(options.steps / clock.seconds)
                samples["cpu"].setdefault(name, []).append(1000 * clock.cpu_seconds / options.steps)
    if os.environ["RANK"] == "0":
        options.out.write_text(json.dumps(samples))


def arms(out: Path, repeat: int) -> list[Arm]:
    """Return the arms that can be measured here."""
    world_size = int(os.environ["WORLD_SIZE"])

    def hand(name: str) -> Arm:
        def train(task: Task, clock: Clock) -> None:
            open_group(f"{out}.{repeat}.{name}", world_size)
            by_hand.train(task, clock)

        return name, train

    def dstrat(task: Task, clock: Clock) -> None:
        with_dstrat.train(task, world_size, clock)

    # The second one by hand shows how far apart two equal arms are: what is less than that is noise.
    found: list[Arm] = [hand("by hand"), hand("by hand again"), ("dstrat", dstrat)]
    if importlib.util.find_spec("lightning"):
        import with_lightning

        def lightning(task: Task, clock: Clock) -> None:
            # Left to itself, Lightning meets in torchrun's store, where it finds what its last fit left there.
            open_group(f"{out}.{repeat}.lightning", world_size)
            with_lightning.train(task, world_size, clock)

        found.append(("lightning", lightning))
    return found


def strategy_arms(strategies: list[str]) -> list[Arm]:
    """Return an arm for each strategy, and a second one of the first, which shows what is noise."""

    def arm(name: str, strategy: str) -> Arm:
        def train(task: Task, clock: Clock) -> None:
            with_dstrat.train(task, int(os.environ["WORLD_SIZE"]), clock, strategy)

        return name, train

    return [*(arm(strategy, strategy) for strategy in strategies), arm(f"{strategies[0]} again", strategies[0])]


def open_group(path: str, world_size: int) -> None:
    """Open a process group whose ranks meet in a file of their own."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(os.environ["RANK"]), world_size=world_size)


if __name__ == "__main__":
    main()
