"""Comparison of the replicas of a module, which ranks train on different data and have to keep equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

_STEPS_BETWEEN_CHECKS = 128
_TOLERANCE = 1e-3  # of a norm; devices of two kinds round differently


def is_compared(number: int) -> bool:
    """Return whether ranks compare what they share in a step: in steps 1, 2, 4, 8 ... and in each 128th."""
    return not number % _STEPS_BETWEEN_CHECKS or not number & (number - 1)


@torch.no_grad()
def check_same_parameters(
    parameters: Mapping[str, Tensor], largest: Callable[[Tensor], Any], number: int, strategy: str
) -> None:
    """Check that parameters have the same norms on all ranks; collective.

    Synchronized gradients keep replicas equal.  Nothing else would show that a layer has changed its parameters by the
    batch of its rank.

    Args:
        parameters: The parameters by name; those that have no norm are left out, such as quantized ones.
        largest: Returns the elementwise maximum of a vector over the ranks.
        number: Number of the optimizer step, from 1.
        strategy: Name of the strategy.

    Raises:
        MisuseError: They differ; on all ranks.
    """
    replicas = {name: one for name, one in parameters.items() if _has_norm(one)}
    if not replicas:
        return
    of_each = [torch.linalg.vector_norm(one).float() for one in replicas.values()]
    # A module may be on several devices; a maximum may leave nan out.
    norms = torch.stack([norm.to(of_each[0].device) for norm in of_each]).nan_to_num(nan=-1.0)
    bounds = largest(torch.stack([norms, -norms])).tolist()
    for name, highest, lowest in zip(replicas, *bounds, strict=True):
        if highest + lowest > _TOLERANCE * max(abs(highest), abs(lowest)):  # the second one is the negative minimum
            raise MisuseError(
                f"ranks have other values of the parameter {name!r} in optimizer step {number} (norms from "
                f"{-lowest:.6g} to {highest:.6g}): {strategy} synchronizes gradients, so that whatever else changes "
                "parameters has to do the same on all ranks. A layer that takes first values from a batch (ActNorm), "
                "or scales its parameters in each forward (Embedding with max_norm), has those of its rank's batch: "
                "let it compute them from strategy.all_gather(batch), or do it before fit. A strategy whose replicas "
                "are meant to differ has compares_replicas = False"
            )


def _has_norm(parameter: Tensor) -> bool:
    is_plain = type(parameter) in (torch.Tensor, Parameter) and parameter.layout is torch.strided
    is_number = parameter.is_floating_point() or parameter.is_complex()
    return is_plain and is_number and parameter.element_size() > 1 and not parameter.is_meta  # not of 8 bits
