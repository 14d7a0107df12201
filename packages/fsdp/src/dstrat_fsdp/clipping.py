"""Clipping gradients that are sharded, each over a mesh of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.device_mesh import DeviceMesh


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

    The squares of this rank's parts are summed over the ranks that have other parts, for each way of sharding by
    itself, in one collective for each dimension of its mesh.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(_layout(gradient), []).append(_local(gradient))
    squares = []
    for layout, parts in by_layout.items():
        norms = torch._foreach_norm(parts)  # noqa: SLF001 - as torch.nn.utils does
        square = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms])).square()
        for mesh, dimension in layout:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _layout(gradient: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the dimensions of a mesh along which ranks have different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        (gradient.device_mesh, dimension)
        for dimension, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


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
