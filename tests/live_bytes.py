"""The bytes of tensors that are made while a test watches."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dstrat.interfaces.batch import apply_to_tensors


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the new tensors that are in memory.

    Attributes:
        bytes: Bytes now.
        largest: Most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(cls not in (torch.Tensor, torch.nn.Parameter) for cls in types):
            return NotImplemented  # a DTensor calls operations of its shards, which are counted then
        # A view, or a result in place, has the storage of an argument, which may be older than this context.
        apply_to_tensors((args, kwargs or {}), self._leave_out)
        output = func(*args, **(kwargs or {}))
        apply_to_tensors(output, self._count)
        self.largest = max(self.largest, self.bytes)
        return output

    def _leave_out(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._begin(storage, 0)
        return tensor

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if type(tensor) is torch.Tensor and not tensor.is_meta and storage._cdata not in self._known:
            self._begin(storage, storage.nbytes())
        return tensor

    def _begin(self, storage: Any, size: int) -> None:
        self._known.add(storage._cdata)
        self.bytes += size
        weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size
