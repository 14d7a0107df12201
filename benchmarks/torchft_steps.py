"""Time of a step of dstrat-torchft over that of torchft's documented loop; two groups on CPUs, one thread each.

The arms run in turn, each with a lighthouse and two programs, with the same module, data and optimizer::

    .nox/shared/bin/python benchmarks/torchft_steps.py --rounds 3 --steps 400
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

GROUPS = 2
WAIT = timedelta(seconds=30)
GOAL = 1.05


class Net(TrainModule):
    """A perceptron whose step takes some milliseconds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - the interface's
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Times(Callback):
    """Notes the time at the end of each batch."""

    def __init__(self) -> None:
        self.wall: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:  # noqa: ARG002 - the hook's
        self.wall.append(time.perf_counter())


def dataset(steps: int) -> TensorDataset:
    """Return samples for as many batches of each group."""
    return TensorDataset(torch.randn(32 * GROUPS * steps, 64), torch.randn(32 * GROUPS * steps, 1))


def by_hand(net: Net, steps: int) -> list[float]:
    """Train as torchft's train_ddp.py does."""
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

    group = int(os.environ["REPLICA_GROUP_ID"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sampler: Any = DistributedSampler(
        dataset(steps), replica_rank=group, num_replica_groups=GROUPS, group_rank=0, num_replicas=1
    )
    loader = DataLoader(sampler.dataset, batch_size=32, sampler=sampler)
    optimizer: Any = net.configure_optimizers()

    def load(state: Any) -> None:
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=WAIT),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"group_{group}",
        timeout=WAIT,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
    )
    model: Any = DistributedDataParallel(manager, net.layers)
    managed: Any = Optimizer(manager, optimizer)
    times = Times()
    for inputs, targets in loader:
        managed.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        managed.step()
        times.on_train_batch_end()
    manager.shutdown()
    return times.wall


def with_dstrat(net: Net, steps: int) -> list[float]:
    """Train with the Trainer."""
    times = Times()
    trainer = Trainer(
        strategy="torchft_ddp",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    trainer.fit(net, DataLoader(dataset(steps), batch_size=32, shuffle=True))
    return times.wall


def run_groups(arm: str, arguments: argparse.Namespace) -> list[float]:
    """Run an arm; return the milliseconds of group 0's steps, without the first twenty."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=GROUPS, join_timeout_ms=1000)
    port = lighthouse.address().rpartition(":")[2]
    variables = {
        "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        "NUM_REPLICA_GROUPS": str(GROUPS),
        "OMP_NUM_THREADS": "1",
        "RUST_LOG": "error",
    }
    sizes = [f"--steps={arguments.steps}", f"--width={arguments.width}"]
    programs = [
        subprocess.Popen(
            [sys.executable, __file__, f"--arm={arm}", *sizes],
            env={**os.environ, **variables, "REPLICA_GROUP_ID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(GROUPS)
    ]
    outputs = [program.communicate(timeout=120) for program in programs]
    lighthouse.shutdown()
    for program, (_, errors) in zip(programs, outputs, strict=True):
        if program.returncode:
            raise RuntimeError(errors)
    times: list[float] = json.loads(outputs[0][0].splitlines()[-1])
    return [1000 * (after - before) for before, after in pairwise(times[20:])]


def main() -> None:
    """Run the arms in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", choices=ARMS, help="run one group of this arm, and print its times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.arm:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps(ARMS[arguments.arm](Net(arguments.width), arguments.steps)))
        return
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ratios = []
    for _ in range(arguments.rounds):
        medians = {}
        for arm in ARMS:
            times = run_groups(arm, arguments)
            medians[arm] = statistics.median(times)
            samples[arm] += times
        ratios.append(medians["dstrat"] / medians["hand"])
    by_arm = {arm: statistics.median(times) for arm, times in samples.items()}
    print(
        f"a step of {GROUPS} groups, medians: by hand {by_arm['hand']:.2f} ms, dstrat {by_arm['dstrat']:.2f} ms; "
        f"ratios of the rounds {', '.join(f'{ratio:.3f}' for ratio in ratios)}, "
        f"their median {statistics.median(ratios):.3f} (goal {GOAL})"
    )


ARMS = {"hand": by_hand, "dstrat": with_dstrat}

if __name__ == "__main__":
    from dstrat_torchft.internals import LighthouseServer

    main()
