"""The bytes of a part of a tensor, read bucket by bucket, wherever the tensor lives."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat.builtin.checkpoint.portable.parts import Part


class Payload:
    """A part that is to be written.

    Bytes on the CPU are handed out without a copy, those of an accelerator one bucket at a time.  A view that is not
    contiguous is copied as a whole when its first byte is read, and let go after its last.

    Args:
        name: Name of the tensor.
        part: The box and its elements.
    """

    def __init__(self, name: str, part: Part) -> None:
        self.name = name
        self.starts = part.starts
        self.shape = tuple(part.tensor.shape)
        self.dtype = part.tensor.dtype
        self.num_bytes = part.tensor.numel() * part.tensor.element_size()
        self.tensor = part.tensor
        self._copy: Tensor | None = None
        self._left = self.num_bytes
        self._lock = threading.Lock()

    def view(self, begin: int, end: int) -> memoryview:
        """Return some of the bytes; each is asked for once."""
        data = self._bytes()[begin:end]
        with self._lock:
            self._left -= end - begin
            if self._left == 0:
                self._copy = None
        return data.cpu().numpy().data

    def _bytes(self) -> Tensor:
        if self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg():
            return as_bytes(self.tensor)
        with self._lock:
            if self._copy is None:
                self._copy = as_bytes(self.tensor.resolve_conj().resolve_neg().contiguous())
            return self._copy


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat tensor of uint8."""
    flat = tensor.detach().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element may have any stride
