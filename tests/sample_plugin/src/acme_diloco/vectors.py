"""Tensors of any shapes as one vector, so that one message carries them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of the values of all tensors, ``(numbers,)``."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def assign(tensors: Sequence[Tensor], vector: Tensor) -> None:
    """Give the tensors the values of a vector that :func:`joined` has made of such."""
    with torch.no_grad():
        parts = torch.split(vector, [tensor.numel() for tensor in tensors])
        for tensor, values in zip(tensors, parts, strict=True):
            tensor.copy_(values.view_as(tensor))
