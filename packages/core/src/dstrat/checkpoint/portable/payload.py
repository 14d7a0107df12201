"""Bytes of a box of a tensor, on any device, bucket by bucket."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.parallel.internals import storage_key
from dstrat.parallel.shards import is_distributed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.parallel.shards import LocalBox


class Payload:
    """A box of a tensor to be written.

    Bytes on the CPU are not copied; those of an accelerator are copied one bucket at a time.  A box that is not
    contiguous is copied completely on the first read, and the copy is freed after the last.

    Args:
        name: Name of the tensor.
        box: The box.
    """

    def __init__(self, name: str, box: LocalBox) -> None:
        self.name = name
        self.starts = box.starts
        self.shape = tuple(box.tensor.shape)
        self.dtype = box.tensor.dtype
        self.num_bytes = box.tensor.numel() * box.tensor.element_size()
        self.tensor = box.tensor
        self._copy: Tensor | None = None
        self._remaining = self.num_bytes
        self._lock = threading.Lock()

    def view(self, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end``; each byte is read once."""
        if self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg():
            data = as_bytes(self.tensor)[begin:end]
        else:
            with self._lock:  # threads read different buckets of one box
                if self._copy is None:
                    self._copy = as_bytes(self.tensor.resolve_conj().resolve_neg().contiguous())
                data = self._copy[begin:end]
                self._remaining -= end - begin
                if self._remaining == 0:
                    self._copy = None
        if not data.is_cpu:
            data = host_memory(data.numel(), pins=True).copy_(data)
        return data.numpy().data


def host_memory(num_bytes: int, *, pins: bool) -> Tensor:
    """Return uninitialized bytes on the CPU, pinned where that is possible: a device copies to these much faster."""
    if pins:
        # A device may have no pinned memory, and the system limits how much there is.
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def host_memory_like(tensor: Tensor) -> Tensor:
    """Return an uninitialized tensor on the CPU like one of a device, pinned where that is possible."""
    with contextlib.suppress(RuntimeError):  # as in host_memory
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    return torch.empty_like(tensor, device="cpu")


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Wait for everything that is queued on all streams of devices; nothing is queued on the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:  # copies of others are never non-blocking
            torch.accelerator.synchronize(device)


def memory_key(tensor: Tensor) -> Any:
    """Return a value that is equal for two dense tensors if they are the same elements of the same memory."""
    # Tensors of some backends have the address 0, which would make all tensors of one shape equal.
    address = tensor.data_ptr() or (storage_key(tensor), tensor.storage_offset())
    view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return tensor.dtype, tensor.device, address, view


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a flat tensor of uint8."""
    flat = tensor.detach().reshape(-1)
    # view needs a last stride of 1, and a tensor of one element may have any stride.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def check_kind(tensor: Tensor | FlatShard, name: str) -> None:
    """Raise a :class:`CheckpointError` for a tensor that cannot be saved: sparse, quantized, on meta ..."""
    if isinstance(tensor, FlatShard):
        tensor = tensor.local
    kind = type(tensor)
    reason = None
    # A subclass has contents that its elements do not show; it would come back as a plain tensor.
    if kind not in (Tensor, torch.nn.Parameter) and not is_distributed(tensor):
        reason = f"is a {kind.__module__}.{kind.__qualname__}"
    elif tensor.layout != torch.strided:
        reason = f"has the layout {tensor.layout}"
    elif tensor.is_meta:
        reason = "is on the device meta, so it has no values"
    elif tensor.is_quantized:
        reason = "is quantized"
    elif tensor.is_nested:
        reason = "is nested"
    if reason:
        raise CheckpointError(f"tensor {name!r} {reason}: a checkpoint holds dense tensors and DTensors only")
