"""One rank of a sharded training: its speed beside ``fully_shard`` by hand, its memory, its losses."""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from fsdp_workload import Block, Net, loader, rank, world_size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

from dstrat import LambdaCallback, Trainer
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP, BATCH = 5, 64
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
LOSS_STEPS, LOSS_WIDTH = 20, 32


def main() -> None:
    """Measure one thing, and write what this rank has found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("steps", "memory", "building", "losses"), required=True)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    measure: dict[str, Callable[[], Any]] = {
        "steps": lambda: speeds(given.out, given.steps, given.repeats),
        "memory": lambda: held(given.options),
        "building": most_while_building,
        "losses": lambda: losses(given.options),
    }
    found = measure[given.what]()
    Path(f"{given.out}.{rank()}.json").write_text(json.dumps(found))


def fit(module: Net, strategy: Any, *, steps: int, shares: int, tell: Callable[[int], None], **options: Any) -> None:
    """Train for some steps."""
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=world_size(),
        max_steps=steps,
        callbacks=LambdaCallback(on_train_batch_end=lambda *arguments: tell(arguments[-1] + 1)),
        **QUIET,
        **options,
    )
    batches = loader(steps * options.get("accumulate_grad_batches", 1), BATCH, shares)
    trainer.fit(module, batches)


# Speed


class Clock:
    """Takes the time and the processor time of some steps."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def __call__(self, done: int) -> None:
        """Take note of how many steps are done."""
        if done == self._first:
            self._begin = time.perf_counter(), time.process_time()
        if done == self._last:
            self.seconds = time.perf_counter() - self._begin[0]
            self.cpu_seconds = time.process_time() - self._begin[1]


def speeds(out: Path, steps: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return steps per second, and milliseconds of computing per step, of each arm in each repeat."""
    samples: dict[str, dict[str, list[float]]] = {"steps/s": {}, "cpu": {}}
    order = random.Random(0)
    for repeat in range(repeats + 1):
        arms = [("by hand", by_hand), ("by hand again", by_hand), ("dstrat", with_dstrat)]
        order.shuffle(arms)
        for name, train in arms:
            clock = Clock(WARMUP, WARMUP + steps)
            train(f"{out}.{repeat}.{name.replace(' ', '-')}", WARMUP + steps, clock)
            gc.collect()
            if repeat:  # the first round only loads what the others find loaded
                samples["steps/s"].setdefault(name, []).append(steps / clock.seconds)
                samples["cpu"].setdefault(name, []).append(1000 * clock.cpu_seconds / steps)
    return samples


def by_hand(meeting: str, steps: int, tell: Clock) -> None:
    """Train as one writes it with torch alone."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank(), world_size=world_size())
    mesh = init_device_mesh("cpu", (world_size(),))
    module = Net(512)
    for block in module.layers[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = module.configure_optimizers()
    data = loader(steps, BATCH, world_size())
    sampler = DistributedSampler(data.dataset, world_size(), rank(), shuffle=False)
    batches = torch.utils.data.DataLoader(data.dataset, batch_size=data.batch_size, sampler=sampler)
    for index, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x), y).backward()
        optimizer.step()
        tell(index + 1)
    dist.destroy_process_group()


def with_dstrat(meeting: str, steps: int, tell: Clock) -> None:
    """Train the same with the Trainer."""
    del meeting
    fit(Net(512), "fsdp", steps=steps, shares=world_size(), tell=tell)


# Memory


def live_bytes() -> int:
    """Return the bytes of all tensors that are alive, storages counted once; those of shards count as shards."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would wake torch's deprecated names
        if issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held(options: dict[str, Any]) -> dict[str, float]:
    """Return what a rank holds after a step, data and all, and its share of parameters, gradients and state."""
    before, peak_before = live_bytes(), peak()
    found: dict[str, float] = {}
    module = Net(512, 8, is_late=True)

    def tell(done: int) -> None:
        module.losses.clear()
        if done == 2:
            count = sum(parameter.numel() for parameter in module.parameters())
            shards = options.get("device_mesh", [world_size()])[-1]
            found.update(bytes=live_bytes() - before, share=4 * 4 * count / shards, peak=peak() - peak_before)

    fit(module, strategy_of(options), steps=3, shares=world_size(), tell=tell)
    return found


def peak() -> int:
    """Return the largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def most_while_building() -> dict[str, float]:
    """Return the most that a rank holds while a module is made and sharded, its shard and its largest block."""
    most, before = 0, live_bytes()
    plain = nn.Linear.reset_parameters

    def watched(layer: nn.Linear) -> None:
        nonlocal most
        plain(layer)
        if not layer.weight.is_meta:
            most = max(most, live_bytes() - before)

    nn.Linear.reset_parameters = watched
    module = Net(512, 8, is_late=True)
    fit(module, "fsdp", steps=1, shares=world_size(), tell=lambda _: None)
    whole = 4 * sum(parameter.numel() for parameter in module.parameters())
    block = 4 * sum(parameter.numel() for parameter in Block(512).parameters())
    return {"most": most, "bound": whole / world_size() + block, "whole": whole}


# Losses


def losses(options: dict[str, Any]) -> list[float]:
    """Return the losses of this rank."""
    module = Net(LOSS_WIDTH, activation=torch.tanh)
    options = dict(options)
    trainer = options.pop("trainer", {})
    tensor_parallel = options.get("tensor_parallel_size", 1)
    fit(
        module, strategy_of(options), steps=LOSS_STEPS, shares=world_size() // tensor_parallel, tell=lambda _: None,
        **trainer,
    )  # fmt: skip
    return [float(loss) for loss in module.losses]


def strategy_of(options: dict[str, Any]) -> Any:
    """Return the strategy that some options are of; ``"single_device"`` for one process."""
    if world_size() == 1:
        return "single_device"
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    if options.pop("checkpoints_blocks", False):
        options["activation_checkpointing"] = Block
    return (ModelParallelStrategy if "tensor_parallel_size" in options else FSDPStrategy)(**options)


if __name__ == "__main__":
    main()
