"""One rank that trains a pipeline in turn by hand and with dstrat, in the same processes."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Pipeline, Trainer, TrainModule
from dstrat.callbacks import LambdaCallback

WIDTH, BLOCKS, BATCH, MICROBATCHES = 512, 8, 64, 4
WARMUP, STEPS = 5, 30
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Block(nn.Module):
    """Two layers with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        computed: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return computed


class Net(TrainModule):
    """A chain of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(Block() for _ in range(BLOCKS)))

    def configure_model(self) -> None:
        strategy: Any = self.trainer.strategy
        if strategy.tensor_parallel_size > 1:
            for block in self.net:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, strategy.device_mesh["tp"], plan)

    def configure_pipeline(self) -> Pipeline:
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - the hook's
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock:
    """Time of the steps after the warm-up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, done: int) -> None:
        """Take note of how many steps are done."""
        if done == WARMUP:
            self.seconds = -time.perf_counter()
        if done == WARMUP + STEPS:
            self.seconds += time.perf_counter()


def main() -> None:
    """Measure, and let rank 0 write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--subject", choices=("speeds", "parameters"), required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    found: Any = speeds(options.out, options.repeats) if options.subject == "speeds" else parameters()
    if os.environ["RANK"] == "0":
        options.out.write_text(json.dumps(found))


def speeds(out: Path, repeats: int) -> dict[str, list[float]]:
    """Return steps per second of each arm in each repeat."""
    samples: dict[str, list[float]] = {}
    order = random.Random(0)  # the same in all ranks
    for repeat in range(repeats + 1):
        arms = [("by hand", by_hand), ("by hand again", by_hand), ("dstrat", with_dstrat)]
        order.shuffle(arms)
        for name, train in arms:
            clock = Clock()
            train(f"{out}.{repeat}.{name.replace(' ', '-')}", clock)
            gc.collect()
            if repeat:  # the first round only loads what the others find loaded
                samples.setdefault(name, []).append(STEPS / clock.seconds)
    return samples


def loader(readers: int, share: int) -> DataLoader[Any]:
    """Return the batches of a reader."""
    inputs = torch.randn(BATCH * (WARMUP + STEPS) // readers, WIDTH, generator=torch.Generator().manual_seed(share))
    return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=BATCH // readers)


def by_hand(meeting: str, clock: Clock) -> None:
    """Train as one writes it with torch.distributed.pipelining and FSDP2."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pp", "dp"))
    stage, share = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    layers = Net().net[stage * BLOCKS // 2 : (stage + 1) * BLOCKS // 2]
    for block in layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(layers, mesh=mesh["dp"])
    pipeline_stage = PipelineStage(layers, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipeline_stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
    for index, (inputs, targets) in enumerate(loader(size // 2, share)):
        optimizer.zero_grad()
        if stage == 0:
            schedule.step(inputs)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        clock(index + 1)
    dist.destroy_process_group()


def with_dstrat(meeting: str, clock: Clock) -> None:
    """Train the same with the Trainer."""
    del meeting
    size = int(os.environ["WORLD_SIZE"])
    trainer = Trainer(
        strategy=f"mesh(pp=2, microbatches={MICROBATCHES})",
        accelerator="cpu",
        devices=size,
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=LambdaCallback(on_train_batch_end=lambda *arguments: clock(arguments[-1] + 1)),
        **QUIET,
    )
    trainer.fit(Net(), loader(size // 2, int(os.environ["RANK"]) % (size // 2)))


def parameters() -> dict[str, float]:
    """Return the largest number of parameters that a rank has with two stages and split layers, and a quarter."""
    net, held = Net(), []

    def count(*_: Any) -> None:
        local = net.trainer.strategy.local_weights().values()
        own = torch.tensor(
            sum(value.to_local().numel() if hasattr(value, "to_local") else value.numel() for value in local)
        )
        held.append(float(net.trainer.strategy.reduce(own.float(), reduce_op="max")))

    whole = sum(parameter.numel() for parameter in net.parameters())
    callback = LambdaCallback(on_train_end=count)
    Trainer(strategy="mesh(pp=2, tp=2)", accelerator="cpu", devices=4, max_steps=1, callbacks=callback, **QUIET).fit(
        net, loader(1, 0)
    )
    return {"largest": held[0], "ideal": whole / 4}


if __name__ == "__main__":
    main()
