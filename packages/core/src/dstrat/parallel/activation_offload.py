"""Offload of activations to the host, beside computation where the device has streams."""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dstrat.parallel.internals import change_count, has_plain_storage, storage_key
from dstrat.parallel.shards import is_distributed, local_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

_SMALLEST = 1024
"""Smallest tensor in bytes that is offloaded; a copy of less takes longer than it is worth."""
_ALIGNMENT = 512
"""Bytes to which torch aligns storages; a copy of a part begins at a multiple, so that kernels compute as before."""
_LAYERS_IN_FLIGHT = 2
"""Number of layers whose activations are still on the device, while they are copied."""


class ActivationOffload:
    """Moves the tensors that layers save for the backward pass to the host, and back before it needs them.

    Parameters and buffers stay.  With streams, the copies of a layer run while the next one computes, and those for a
    backward pass while the layer after it computes gradients.

    Args:
        host: Type of the device that they are moved to; with ``"meta"`` nothing is copied, for an estimate.
        device: Device of the training.
        has_streams: Whether its streams copy beside computation; otherwise computation waits.
    """

    def __init__(self, host: str, device: torch.device, *, has_streams: bool) -> None:
        self.host, self.device, self.has_streams = host, device, has_streams
        self.stream = torch.Stream(device) if has_streams and host != "meta" else None
        self._in_flight: deque[weakref.ref[_SavedTensors]] = deque()

    def offloading(self, layer: Module) -> Callable[..., Any]:
        """Return a layer's forward that offloads what it saves."""
        return _OffloadedForward(self, layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        return self  # of copied layers too: it has a stream

    def run(self, layer: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, and offload what it saves."""
        saved = _SavedTensors(self, layer, self._in_flight[-1]() if self._in_flight else None)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            output = forward(*args, **kwargs)
        saved.end_forward()
        self._in_flight.append(weakref.ref(saved))
        while len(self._in_flight) > (_LAYERS_IN_FLIGHT if self.has_streams else 0):
            earlier = self._in_flight.popleft()()
            if earlier is not None:
                earlier.free_device()
        return output

    def wait(self, event: torch.Event | None) -> None:
        """Let computation wait for copies."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)


class _OffloadedForward:
    """A layer's forward that offloads what it saves.  A copy of the layer has a copy that calls its own forward."""

    def __init__(self, offload: ActivationOffload, layer: Module) -> None:
        self.offload, self.layer, self.forward = offload, layer, layer.forward
        # What the layer calls may be compiled.  Here, as this imports the compiler.
        self._run: Callable[..., Any] = torch.compiler.disable(_run_offloaded, recursive=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, args, kwargs)


def _run_offloaded(layer: _OffloadedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return layer.forward(*args, **kwargs)
    return layer.offload.run(layer.layer, layer.forward, *args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """A saved tensor, as a view of a copied range of its storage.

    Attributes:
        saved: Has the range.
        index: Which of them.
        size: Size of the view.
        stride: Its stride.
        offset: Its first element in the range.
        rebuild: Returns the DTensor whose local tensor it is; None for a plain tensor.
    """

    saved: _SavedTensors
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    rebuild: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Range:
    """Elements of a storage that are copied together, from ``begin`` up to ``end``."""

    begin: int
    end: int
    index: int


class _SavedTensors:
    """The tensors that one forward pass of a layer saves: of each storage what they are views of.

    Args:
        offload: Has the host and the stream.
        layer: The layer.
        previous: Those of the layer before it, which the backward pass needs next.
    """

    def __init__(self, offload: ActivationOffload, layer: Module, previous: _SavedTensors | None) -> None:
        self._offload = offload
        self._previous = None if previous is None else weakref.ref(previous)
        self._layer = layer
        self._resident: set[Any] = set()  # storages of parameters and buffers
        self._ranges: dict[Any, list[_Range]] = {}  # by storage, version and dtype
        self._on_device: list[Tensor] | None = []
        self._on_host: list[Tensor] = []
        self._sources: list[torch.device] = []
        self._copied: torch.Event | None = None

    # Forward pass

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if is_distributed(tensor):
            packed = self.pack(local_tensor(tensor))
            return dataclasses.replace(packed, rebuild=_rebuilding(tensor)) if isinstance(packed, _View) else tensor
        if (
            not has_plain_storage(tensor)
            or tensor.device.type == self._offload.host
            or tensor.nbytes < _SMALLEST
            or self._is_resident(tensor)
        ):
            return tensor
        copied = self._copied_range(tensor)
        return _View(
            saved=self,
            index=copied.index,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()) - copied.begin,
        )

    def _is_resident(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer, or a view of one.

        A layer inside may be sharded, and gather its parameters after the forward pass of this one has begun.
        """
        if storage_key(tensor) not in self._resident:
            tensors = (one for group in (self._layer.parameters(), self._layer.buffers()) for one in group)
            self._resident = set(map(storage_key, map(local_tensor, tensors)))
        return storage_key(tensor) in self._resident

    def _copied_range(self, tensor: Tensor) -> _Range:
        """Return the range of a tensor's storage that has it; begin to copy it to the host if none has."""
        # The storage cannot be freed, nor its address reused, while the list has it.
        key = storage_key(tensor), change_count(tensor), tensor.dtype
        ranges = self._ranges.setdefault(key, [])
        begin = int(tensor.storage_offset())
        end = begin + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for copied in ranges:
            if copied.begin <= begin and end <= copied.end:
                return copied
        begin -= begin % (_ALIGNMENT // tensor.itemsize)
        total = tensor.untyped_storage().nbytes() // tensor.itemsize
        # The whole storage for a large view: others of it often follow, as of queries, keys and values in one tensor.
        if sum(each.end - each.begin for each in ranges) + end - begin > total // 2:
            begin, end = 0, total
        ranges.append(_Range(begin=begin, end=end, index=len(self._on_host)))
        self._copy(tensor, begin, end)
        return ranges[-1]

    @torch.no_grad()
    def _copy(self, tensor: Tensor, begin: int, end: int) -> None:
        """Begin to copy elements of the storage of a tensor to the host."""
        assert self._on_device is not None  # noqa: S101 - until the end of the forward pass
        elements = tensor.detach().as_strided((end - begin,), (1,), begin)
        self._on_device.append(elements)
        self._sources.append(elements.device)
        stream = self._offload.stream
        if stream is None:
            self._on_host.append(elements.to(self._offload.host))
            return
        host = torch.empty(elements.shape, dtype=elements.dtype, device=self._offload.host, pin_memory=True)
        stream.wait_stream(torch.accelerator.current_stream(self._offload.device))
        with stream:
            host.copy_(elements, non_blocking=True)
        self._on_host.append(host)

    def end_forward(self) -> None:
        """Record the end of the copies."""
        if self._offload.stream is not None:
            self._copied = self._offload.stream.record_event()

    def free_device(self) -> None:
        """Free the memory of the device, in which computation goes on when the copies have ended."""
        self._offload.wait(self._copied)
        self._on_device = None

    # Backward pass

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        elements = packed.saved.restore()[packed.index]
        packed.saved.restore_previous()
        # A range that was never freed is still a view of the first storage, in which it may not be at the beginning.
        view = elements.as_strided(packed.size, packed.stride, int(elements.storage_offset()) + packed.offset)
        return view if packed.rebuild is None else packed.rebuild(view)

    @torch.no_grad()
    def restore(self, *, waits: bool = True) -> list[Tensor]:
        """Return the copied ranges on the device, to which they are copied in this backward pass once."""
        if self._on_device is None:
            self._on_device = self._fetch()
        if waits:
            self._offload.wait(self._copied)
            self._copied = None
        return self._on_device

    def restore_previous(self) -> None:
        """Begin to restore the layer before this one, whose gradients are computed next."""
        previous = None if self._previous is None else self._previous()
        if previous is not None and self._offload.has_streams:
            previous.restore(waits=False)

    def _fetch(self) -> list[Tensor]:
        stream, device = self._offload.stream, self._offload.device
        if stream is None:
            return [host.to(source) for host, source in zip(self._on_host, self._sources, strict=True)]
        on_device = [torch.empty_like(host, device=device) for host in self._on_host]
        # Their memory may still be in use by computation that is queued.
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            for target, host in zip(on_device, self._on_host, strict=True):
                target.copy_(host, non_blocking=True)
                target.record_stream(stream)  # an error may free it before the copy has ended
        self._copied = stream.record_event()
        return on_device


def _rebuilding(tensor: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that makes a DTensor like another one from its local tensor, without keeping that one."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

    def rebuild(local: Tensor) -> Tensor:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    return rebuild
