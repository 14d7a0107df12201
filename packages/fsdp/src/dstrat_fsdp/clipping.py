"""Clipping gradients that are sharded, each over a mesh of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@torch.no_grad()
def clip_by_norm(parameters: Iterable[Tensor], largest: float) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most the largest; collective.

    The norm is that of the whole gradients, whatever meshes they are sharded over, and the same on every rank.

    Args:
        parameters: Whose gradients are clipped; those that have none are left out.
        largest: The largest 2-norm.

    Returns:
        The norm before clipping, a scalar.
    """
    gradients = _gradients(parameters)
    if not gradients:
        return torch.zeros(())
    norm = total_norm(gradients)
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # torch's own formula, so that losses are those of one device
    torch._foreach_mul_([_local(gradient) for gradient in gradients], factor)
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Limit each value of gradients in place.

    Raises:
        MisuseError: A gradient is still spread over ranks as summands, of which no single value is known.
    """
    local = [_local(gradient) for gradient in _gradients(parameters)]
    for gradient in local:
        gradient.clamp_(-largest, largest)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar; collective.

    torch computes it for gradients of one mesh; those of different meshes are combined here.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [_whole(torch.nn.utils.get_total_norm(group)) for group in by_mesh.values()]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _local(gradient: Tensor) -> Tensor:
    """Return this rank's part of a gradient, in the same memory."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise MisuseError(
            "a gradient is not summed over the ranks yet, so that it cannot be clipped: "
            "clip after the last backward pass of an optimizer step"
        )
    return gradient.to_local()
