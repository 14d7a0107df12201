"""Reference training in plain torch with batch norm on shards of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.testing.fits import Fit, numbers
from dstrat.testing.modules import GLOBAL_BATCH, NETS, dataset

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat.testing.place import Place


def with_own_statistics(
    place: Place,  # noqa: ARG001 - every job's function takes it
    work: Fit,
    readers: int,
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the mean loss of each batch, and the statistics that the first rank has gathered, by name.

    Args:
        place: A rank.
        work: A fit of one epoch.
        readers: Ranks that share each batch.
    """
    replicas = [NETS[work.net](work, None) for _ in range(readers)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    losses = []
    for step, parts in enumerate(_batches(work, readers)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_step = [replica.training_step(part, step) for replica, part in zip(replicas, parts, strict=True)]
        torch.stack(of_step).mean().backward()
        for alike in zip(*(replica.parameters() for replica in replicas), strict=True):
            total = torch.stack([parameter.grad for parameter in alike if parameter.grad is not None]).sum(0)
            for parameter in alike:
                parameter.grad = total
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(torch.stack(of_step).mean()))
    return losses, {name: numbers(buffer) for name, buffer in replicas[0].named_buffers()}


def _batches(work: Fit, readers: int) -> list[list[list[Tensor]]]:
    """Return the parts of each batch, one for each reader."""
    size, tensors = GLOBAL_BATCH // readers, dataset(work.samples).tensors
    shares = [torch.arange(work.samples)[reader::readers].split(size) for reader in range(readers)]
    return [[[tensor[rows] for tensor in tensors] for rows in parts] for parts in zip(*shares, strict=True)]
