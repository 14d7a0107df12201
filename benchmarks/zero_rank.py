"""One rank of a training with DeepSpeed: its speed beside DeepSpeed by hand, its start, its losses."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from fsdp_rank import WARMUP, Clock, fit
from fsdp_workload import Net, loader, rank, world_size
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from dstrat_deepspeed import DeepSpeedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, WIDTH, LOSS_WIDTH, LOSS_STEPS = 64, 256, 32, 20
BUCKET = 200_000_000


def main() -> None:
    """Measure one thing, and write what this rank has found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("steps", "start", "losses"), required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--arm", choices=("by hand", "dstrat"), default="dstrat")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "steps":
        found: Any = speeds(given.out, given.stage, given.steps, given.repeats)
    elif given.what == "start":
        found = start(given.out, given.stage, given.arm)
    else:
        found = losses(given.stage, given.options)
    Path(f"{given.out}.{rank()}.json").write_text(json.dumps(found))


def speeds(out: Path, stage: int, steps: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return steps per second, and milliseconds of computing per step, of each arm in each repeat."""
    samples: dict[str, dict[str, list[float]]] = {"steps/s": {}, "cpu": {}}
    order = random.Random(0)
    for repeat in range(repeats + 1):
        arms = [("by hand", by_hand), ("by hand again", by_hand), ("dstrat", with_dstrat)]
        order.shuffle(arms)
        for name, train in arms:
            clock = Clock(WARMUP, WARMUP + steps)
            train(f"{out}.{repeat}.{name.replace(' ', '-')}", stage, WARMUP + steps, clock)
            gc.collect()
            if repeat:  # the first round only loads what the others find loaded
                samples["steps/s"].setdefault(name, []).append(steps / clock.seconds)
                samples["cpu"].setdefault(name, []).append(1000 * clock.cpu_seconds / steps)
    return samples


def start(out: Path, stage: int, arm: str) -> dict[str, float]:
    """Return the seconds, and those of computing, from the start of this process until its first step is done."""
    found: dict[str, float] = {}

    def tell(done: int) -> None:
        if done == 1:
            found.update(seconds=_age(), cpu=time.process_time())

    (by_hand if arm == "by hand" else with_dstrat)(f"{out}.meeting", stage, 1, tell)
    return found


def _age() -> float:
    """Return the seconds since this process started."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def by_hand(meeting: str, stage: int, steps: int, tell: Callable[[int], None]) -> None:
    """Train as one writes it with DeepSpeed alone."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank(), world_size=world_size())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles, for inference only
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    module = Net(WIDTH)
    engine, *_ = deepspeed.initialize(model=module, optimizer=module.configure_optimizers(), config=config(stage))
    data = loader(steps, BATCH, world_size())
    sampler = DistributedSampler(data.dataset, world_size(), rank(), shuffle=False)
    for index, (x, y) in enumerate(DataLoader(data.dataset, batch_size=data.batch_size, sampler=sampler)):
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
        tell(index + 1)
    engine.destroy()
    deepspeed.comm.destroy_process_group()
    deepspeed.comm.comm.cdb = None


def config(stage: int) -> dict[str, Any]:
    """Return the same settings as the strategy's."""
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
    return {
        "train_micro_batch_size_per_gpu": BATCH // world_size(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": {**zero, "allgather_bucket_size": BUCKET, "reduce_bucket_size": BUCKET},
    }


def with_dstrat(meeting: str, stage: int, steps: int, tell: Callable[[int], None]) -> None:
    """Train the same with the Trainer."""
    del meeting
    strategy = DeepSpeedStrategy(stage=stage)
    fit(Net(WIDTH), strategy, steps=steps, shares=world_size(), tell=tell)


def losses(stage: int, options: dict[str, Any]) -> list[float]:
    """Return the losses of this rank."""
    options = dict(options)
    trainer = options.pop("trainer", {})
    module = Net(LOSS_WIDTH, activation=torch.tanh)
    strategy = "single_device" if world_size() == 1 else DeepSpeedStrategy(stage=stage, **options)
    fit(module, strategy, steps=LOSS_STEPS, shares=world_size(), tell=lambda _: None, **trainer)
    return [float(loss) for loss in module.losses]


if __name__ == "__main__":
    main()
