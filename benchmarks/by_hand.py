"""The training as one writes it with torch alone; started by torchrun, or alone on one device."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import Task, loss_of, make_optimizer, read_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def train(task: Task, on_step: Callable[[int], None] | None = None) -> list[Tensor]:
    """Train with DistributedDataParallel in an open process group; return the losses of this rank."""
    dataset = task.dataset(dist.get_world_size())
    sampler = DistributedSampler(dataset, shuffle=not task.losses)
    loader = DataLoader(dataset, batch_size=task.workload.batch_size, sampler=sampler)
    model = DistributedDataParallel(task.network(on_step))
    optimizer = make_optimizer(task.optimizer, model)
    losses = []
    model.train()
    sampler.set_epoch(0)
    for batch in loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if task.losses:
            losses.append(loss.detach())
    return losses


def train_on_one_device(task: Task) -> list[Tensor]:
    """Train in this process alone; return the losses."""
    loader = DataLoader(task.dataset(1), batch_size=task.workload.batch_size)
    model = task.network()
    optimizer = make_optimizer(task.optimizer, model)
    losses = []
    model.train()
    for batch in loader:
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


if __name__ == "__main__":
    task, _ = read_task()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        task.record(train(task))
        dist.destroy_process_group()
    else:
        task.record(train_on_one_device(task))
