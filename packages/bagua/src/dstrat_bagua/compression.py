"""Compression to eight bits by minimum and maximum, and averages of compressed values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

_EPSILON = 1e-7  # Bagua's; without it equal values would divide by zero
_LEVELS = 255.0


def compress(chunks: Tensor) -> Tensor:
    """Compress each row of a matrix to one byte per value.

    The formula is that of Bagua's ``MinMaxUInt8`` (https://arxiv.org/abs/2107.01499): with
    ``scale = 255 / (max - min + 1e-7)``, the levels are ``round(x * scale)``, counted from
    ``round(max * scale) - 255`` on, so that zero stays exactly zero.  With a value that is not finite in it,
    no value of a row is.

    Args:
        chunks: Floating-point numbers of shape ``(rows, n)``.

    Returns:
        Bytes of shape ``(rows, header + n)``: minimum and maximum, each as float32 (float64 for float64), and levels.
    """
    # In half precision the levels themselves would be rounded.
    values = chunks if chunks.dtype is torch.float64 else chunks.float()
    low, high = values.aminmax(dim=1, keepdim=True)
    scale, lowest = _grid(low, high)
    header = torch.cat([low, high], dim=1).view(torch.uint8)
    packed = torch.empty(values.shape[0], header.shape[1] + values.shape[1], dtype=torch.uint8, device=values.device)
    packed[:, : header.shape[1]] = header
    # Where all values are nearly the same, rounding of the lowest level leaves the range of a byte.
    packed[:, header.shape[1] :] = (values * scale).round_().sub_(lowest).clamp_(0, _LEVELS)
    return packed


def decompress(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values that :func:`compress` packed, of shape ``(rows, n)``.

    Args:
        packed: Bytes.
        dtype: Of the values that were compressed, and of the result.
    """
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    width = 2 * kind.itemsize
    low, high = packed[:, :width].clone(memory_format=torch.contiguous_format).view(kind).split(1, dim=1)
    scale, lowest = _grid(low, high)
    return packed[:, width:].to(kind).add_(lowest).div_(scale).to(dtype)


def _grid(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of levels per unit, and the lowest level."""
    scale = _LEVELS / (high - low + _EPSILON)
    return scale, (high * scale).round() - _LEVELS


def average_compressed(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replace a tensor by its average over a group; a rank sends about a quarter of the bytes of a float32 all-reduce.

    Scatter and gather of ByteGrad (https://arxiv.org/abs/2107.01499, section 3): each rank compresses a chunk for every
    other one, averages the chunks that it receives, and sends the average, compressed again, to all.

    Args:
        flat: Of one dimension, and the same shape on every rank.
        group: The ranks.
    """
    size = dist.get_world_size(group)
    width = -(-flat.numel() // size)
    chunks = torch.zeros(size, width, dtype=flat.dtype, device=flat.device)
    chunks.view(-1)[: flat.numel()] = flat
    sent = compress(chunks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    average = compress(decompress(received, flat.dtype).mean(dim=0, keepdim=True))  # of this rank's chunk
    gathered = torch.empty_like(sent)
    dist.all_gather([*gathered.unbind(0)], average[0], group=group)
    flat.copy_(decompress(gathered, flat.dtype).view(-1)[: flat.numel()])
