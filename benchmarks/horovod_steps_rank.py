"""One rank that trains in turn with a hand-written Horovod loop and with dstrat, and times each in its steady state."""

from __future__ import annotations

import argparse
import gc
import json
import random
from pathlib import Path

import horovod.torch as hvd
import with_dstrat
from torch.utils.data import DataLoader, DistributedSampler
from workload import WORKLOADS, Clock, Task, loss_of, make_optimizer

WARMUP = 10
"""Steps before the time starts."""


def main() -> None:
    """Measure, and let rank 0 write steps per second and milliseconds of computing per step of each arm and repeat."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    hvd.init()  # once: all arms use the same connections
    task = Task(workload=WORKLOADS[options.workload], steps=WARMUP + options.steps + 1)
    # The second one by hand shows how far apart two equal arms are: what is less than that is noise.
    arms = {"by hand": train_by_hand, "by hand again": train_by_hand, "dstrat": train_with_dstrat}
    samples: dict[str, dict[str, list[float]]] = {"steps/s": {}, "cpu": {}}
    order = random.Random(0)  # the same in both ranks
    for repeat in range(options.repeats + 1):
        names = list(arms)
        order.shuffle(names)
        for name in names:
            clock = Clock(WARMUP, WARMUP + options.steps)
            arms[name](task, clock)
            gc.collect()
            if repeat:  # the first round only loads what the others find loaded
                samples["steps/s"].setdefault(name, []).append(options.steps / clock.seconds)
                samples["cpu"].setdefault(name, []).append(1000 * clock.cpu_seconds / options.steps)
    if hvd.rank() == 0:
        options.out.write_text(json.dumps(samples))


def train_by_hand(task: Task, clock: Clock) -> None:
    """Train as Horovod's documentation does."""
    dataset = task.dataset(hvd.size())
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, batch_size=task.workload.batch_size, sampler=sampler)
    model = task.network(clock)
    optimizer = make_optimizer(task.optimizer, model)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    model.train()
    sampler.set_epoch(0)
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def train_with_dstrat(task: Task, clock: Clock) -> None:
    """Train with the strategy horovod."""
    with_dstrat.train(task, hvd.size(), clock, strategy="horovod")


if __name__ == "__main__":
    main()
