"""Trainings whose data divides unevenly, and the right parameters after them, computed by plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dstrat.testing.ranks.fits import Fit, FitResult, fit, numbers
from dstrat.testing.ranks.modules import NETS, dataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import RankContext


class RightState(NamedTuple):
    """The parameters after a training, as one list, and the number of its optimizer steps."""

    values: list[float]
    steps: int


def divided_fits(rank_context: RankContext, subject: Subject, works: Mapping[str, Fit]) -> dict[str, FitResult]:
    """Return the results of several trainings, one after the other, in each rank."""
    return {name: fit(rank_context, subject, work) for name, work in works.items()}


def right_states(
    rank_context: RankContext,  # noqa: ARG001 - every job's function takes it
    works: Mapping[str, Fit],
    seen: Mapping[str, Sequence[Sequence[Sequence[int]]]],
) -> dict[str, RightState]:
    """Return the right parameters after several trainings.

    Args:
        rank_context: A rank.
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
    in_group = steps = 0
    for number, batches in enumerate(zip(*seen, strict=True)):
        in_group += 1
        for batch in batches:
            if batch:
                loss = nn.functional.mse_loss(module(inputs[list(batch)].double()), targets[list(batch)].double())
                flat = [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]
                gradients.append(torch.cat(flat))
        if in_group == work.accumulate or (number + 1) % per_epoch == 0:
            if gradients:
                vector = nn.utils.parameters_to_vector(parameters).detach() - torch.stack(gradients).mean(0)
                nn.utils.vector_to_parameters(vector, parameters)
                steps += 1
            gradients, in_group = [], 0
    return RightState(numbers(nn.utils.parameters_to_vector(parameters)), steps)
