"""Gradients that a step should apply, and those of wrong strategies, computed by plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dstrat.testing.ranks.fits import Fit, FitResult, fit, numbers
from dstrat.testing.ranks.modules import GLOBAL_BATCH, NETS, dataset, weight_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import RankContext


RIGHT = "right"


def first_values(_rank_context: RankContext, net: str) -> dict[str, list[float]]:
    """Return the initial parameters of a module."""
    return {name: numbers(value) for name, value in NETS[net](Fit(), None).named_parameters()}


def possible_steps(_rank_context: RankContext, work: Fit, readers: int) -> dict[str, list[float]]:
    """Return the change of the parameters in one step of SGD, as it should be and as typical mistakes make it.

    Args:
        work: A fit of the module ``"linear"`` whose data is one group of ``accumulate`` batches.
        readers: Ranks that share each batch.

    Returns:
        The change by kind of mistake, as a text that completes "the gradient was ..."; the correct one is ``"right"``.
    """
    per_rank = [
        [_gradient(work, reader, readers, batch) for batch in range(work.accumulate)] for reader in range(readers)
    ]
    clip = _clipping(work)
    groups = [_mean(gradients) for gradients in per_rank]  # of each rank, over its batches
    mean = _mean(groups)
    candidates = {RIGHT: clip(mean)}
    if readers > 1:
        for reader, gradient in enumerate(groups):
            candidates[f"that of rank {reader} alone: it was not averaged over the ranks"] = clip(gradient)
        candidates["summed over the ranks instead of averaged"] = clip(mean * readers)
        candidates["divided twice by the number of ranks"] = clip(mean / readers)
    if work.clip is not None:
        candidates["not clipped"] = mean
        if readers > 1:
            candidates["clipped in each rank before it was averaged"] = _mean([clip(gradient) for gradient in groups])
    if work.accumulate > 1:
        candidates["summed over the accumulated batches instead of averaged"] = clip(mean * work.accumulate)
        candidates["divided twice by the number of accumulated batches"] = clip(mean / work.accumulate)
        candidates["that of the last batch only: what was accumulated before is lost"] = clip(
            _mean([gradients[-1] for gradients in per_rank]) / work.accumulate
        )
        candidates["that of the last batch, as if nothing were accumulated"] = clip(
            _mean([gradients[-1] for gradients in per_rank])
        )
    if work.accumulate > 1 and readers > 1:
        candidates["summed again over the ranks with every further batch"] = clip(_summed_again(per_rank))
    candidates["not applied: the parameters are what they were"] = mean * 0
    return {name: numbers(-gradient) for name, gradient in candidates.items()}


def _summed_again(per_rank: list[list[Tensor]]) -> Tensor:
    """Return the gradient where the accumulated sum is reduced over the ranks again after each batch."""
    accumulated = torch.zeros_like(per_rank[0][0])
    for of_batch in zip(*per_rank, strict=True):
        accumulated = accumulated * len(per_rank) + torch.stack(of_batch).sum(0)
    return accumulated / len(per_rank) / len(per_rank[0])


def uneven_groups(_rank_context: RankContext, work: Fit) -> dict[str, list[float]]:
    """Return the parameters after an epoch whose last group of batches is smaller, as they should be and as not.

    The data is two batches of which the first is a group of ``accumulate`` batches, and the second is one batch.
    """
    module = _module()
    gradients = [_batch_gradient(module, work, batch) for batch in range(work.accumulate)]
    _step(module, _mean(gradients))
    dropped = _flat(module)
    last = _batch_gradient(module, work, work.accumulate)
    _step(module, last)
    right = _flat(module)
    divided = dropped - last / work.accumulate  # the learning rate is 1
    return {
        RIGHT: numbers(right),
        "dropped: the parameters are those after the group before it": numbers(dropped),
        f"divided by the {work.accumulate} batches of a whole group, though it has one": numbers(divided),
    }


def _clipping(work: Fit) -> Callable[[Tensor], Tensor]:
    limit = work.clip
    if limit is None:
        return lambda gradient: gradient
    if work.algorithm == "value":
        return lambda gradient: gradient.clamp(-limit, limit)
    return lambda gradient: gradient * min(1.0, limit / (float(gradient.norm()) + 1e-6))  # torch's formula


def _gradient(work: Fit, reader: int, readers: int, batch: int) -> Tensor:
    """Return the gradient of one rank's shard of a batch."""
    size = GLOBAL_BATCH // readers
    mine = torch.arange(work.samples)[reader::readers][batch * size : (batch + 1) * size]
    return _gradient_of(_module(), work, mine)


def _batch_gradient(module: nn.Module, work: Fit, batch: int) -> Tensor:
    return _gradient_of(module, work, torch.arange(batch * GLOBAL_BATCH, (batch + 1) * GLOBAL_BATCH))


def _gradient_of(module: nn.Module, work: Fit, samples: Tensor) -> Tensor:
    inputs, targets, _ = dataset(work.samples)[samples]
    module.zero_grad()
    nn.functional.mse_loss(module(inputs), targets).backward()
    return torch.cat([value.grad.flatten() for value in module.parameters() if value.grad is not None])


def _module() -> nn.Module:
    return NETS["linear"](replace(Fit(), net="linear"), None)


def _step(module: nn.Module, gradient: Tensor) -> None:
    nn.utils.vector_to_parameters(_flat(module) - gradient, module.parameters())


def _flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def _mean(gradients: list[Tensor]) -> Tensor:
    return torch.stack(gradients).mean(0)


# Reference training in plain torch with batch norm on shards of each batch


def with_local_statistics(
    _rank_context: RankContext,
    work: Fit,
    readers: int,
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the mean loss of each batch, and the statistics that the first rank has gathered, by name.

    Args:
        work: A fit of one epoch.
        readers: Ranks that share each batch.
    """
    replicas = [NETS[work.net](work, None) for _ in range(readers)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    losses = []
    for step, shards in enumerate(_batches(work, readers)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        of_step = [replica.training_step(shard, step) for replica, shard in zip(replicas, shards, strict=True)]
        torch.stack(of_step).mean().backward()
        # All replicas get the same gradients, and so stay equal but for their buffers.
        for alike in zip(*(replica.parameters() for replica in replicas), strict=True):
            total = torch.stack([parameter.grad for parameter in alike if parameter.grad is not None]).sum(0)
            for parameter in alike:
                parameter.grad = total
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(torch.stack(of_step).mean()))
    return losses, {name: numbers(buffer) for name, buffer in replicas[0].named_buffers()}


def _batches(work: Fit, readers: int) -> list[list[list[Tensor]]]:
    """Return the shards of each batch, one for each reader."""
    size, tensors = GLOBAL_BATCH // readers, dataset(work.samples).tensors
    shares = [torch.arange(work.samples)[reader::readers].split(size) for reader in range(readers)]
    return [[[tensor[rows] for tensor in tensors] for rows in rank_rows] for rank_rows in zip(*shares, strict=True)]


# Reference training in plain torch whose data divides unevenly


class RightState(NamedTuple):
    """The parameters after a training, as one list, and the number of its optimizer steps."""

    values: list[float]
    steps: int


def divided_fits(rank_context: RankContext, subject: Subject, works: Mapping[str, Fit]) -> dict[str, FitResult]:
    """Return the results of several trainings, one after the other, in each rank."""
    return {name: fit(rank_context, subject, work) for name, work in works.items()}


def right_states(
    _rank_context: RankContext,
    works: Mapping[str, Fit],
    seen: Mapping[str, Sequence[Sequence[Sequence[int]]]],
) -> dict[str, RightState]:
    """Return the right parameters after several trainings.

    Args:
        works: The trainings, with SGD and a learning rate of 1.
        seen: The samples of each batch of each rank, none in a batch without a loss, by the training's name.
    """
    return {name: _right_state(work, seen[name]) for name, work in works.items()}


def _right_state(work: Fit, seen: Sequence[Sequence[Sequence[int]]]) -> RightState:
    module = NETS[work.net](work, None).double()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    inputs, targets = dataset(work.samples).tensors[:2]
    per_epoch = len(seen[0]) // work.epochs
    gradients: list[Tensor] = []
    weights: list[float] = []
    in_group = steps = 0
    for number, batches in enumerate(zip(*seen, strict=True)):
        in_group += 1
        for batch in batches:
            if batch:
                loss = nn.functional.mse_loss(module(inputs[list(batch)].double()), targets[list(batch)].double())
                flat = [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]
                weights.append(weight_of(batch) if work.net == "weighted" else 1.0)
                gradients.append(torch.cat(flat) * weights[-1])
        if in_group == work.accumulate or (number + 1) % per_epoch == 0:
            if gradients:
                vector = nn.utils.parameters_to_vector(parameters).detach() - torch.stack(gradients).sum(0) / sum(
                    weights
                )
                nn.utils.vector_to_parameters(vector, parameters)
                steps += 1
            gradients, weights, in_group = [], [], 0
    return RightState(numbers(nn.utils.parameters_to_vector(parameters)), steps)
