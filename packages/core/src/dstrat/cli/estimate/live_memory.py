"""Live memory of a step on fake tensors: activations, gradients, and tensors on the host."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from dstrat.cli.estimate.work import READS_DEVICE
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.parallel.internals import DispatchMode, storage_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

_CAST = torch.ops.aten._to_copy.default  # noqa: SLF001 - its name in torch, as it appears in a dispatch mode


@dataclass(slots=True)
class _Lifetime:
    """The entries of a timeline that count a storage: from the first up to the end, which is None while it lives."""

    size: int
    first: int
    end: int | None = None


class LiveMemory(DispatchMode):
    """Counts the storages that live after each operation.

    Args:
        persistent: Tensors that are not counted: parameters and buffers.
        forward_dtype: Dtype that parameters have in a forward pass.  Casts of them to it copy nothing, and gradients in
            it are not counted, as they belong to the gathered parameters.  None for the parameters' own dtype.

    Attributes:
        timeline: ``(activations, gradients)`` in bytes after each operation between the two ``begin`` methods.
        largest_on_host: Largest memory of tensors on the meta device, which stands for the host.
    """

    def __init__(self, persistent: Iterable[Tensor], forward_dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        # Keys, not tensors, which would keep the storages alive.
        persistent = list(persistent)
        self._known = {storage_key(tensor) for tensor in persistent}
        self._parameters = {storage_key(tensor) for tensor in persistent if isinstance(tensor, Parameter)}
        self._forward_dtype = forward_dtype
        self._sizes: dict[int, int] = {}
        self._lifetimes: dict[int, _Lifetime] = {}  # only with a forward_dtype
        self._sources: dict[int, _Lifetime] = {}  # of storages that are casts of others
        self._gradients: set[int] = set()
        self._live = self._live_gradients = self._largest = self._before_step = 0
        self.timeline: list[tuple[int, int]] = []
        self._on_host: set[int] = set()
        self._live_on_host = self.largest_on_host = 0
        self._is_in_step = False

    @property
    def live(self) -> int:
        """Bytes of the storages that live now."""
        return self._live

    @property
    def live_gradients(self) -> int:
        """Bytes of the gradients that live now."""
        return self._live_gradients

    @property
    def live_on_host(self) -> int:
        """Bytes of the storages that live now on the host."""
        return self._live_on_host

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Count storages without entries of the timeline."""
        is_in_step, self._is_in_step = self._is_in_step, False
        yield
        self._is_in_step = is_in_step

    def begin_step(self, batch: Any) -> None:
        """Begin the timeline; the batch counts as activations."""
        self._is_in_step = True
        apply_to_tensors(batch, self._count)

    def begin_optimizer_step(self) -> None:
        """End the timeline, and begin to watch temporary memory."""
        self._is_in_step = False
        self._before_step = self._largest = self._live

    def largest_in_optimizer_step(self, state: int) -> int:
        """Return the temporary memory of the optimizer step.

        Args:
            state: Bytes of the optimizer's state, which this step has created.
        """
        return max(0, self._largest - self._before_step - state)

    def count_gradient(self, parameter: Tensor) -> None:
        """Count the storage of a parameter's gradient as such, and no longer as an activation."""
        key = storage_key(parameter.grad) if parameter.grad is not None else None
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self._live_gradients += self._sizes[key]
            source = self._sources.pop(key, None)
            if source is not None:
                # Only now it is known that the cast was of a parameter's gradient.
                self._correct(source, is_gradient=False)
                self._correct(self._lifetimes[key], is_gradient=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_DEVICE:
            return args[0].fake_device
        output = func(*args, **(kwargs or {}))
        if func is _CAST and output.dtype == self._forward_dtype and storage_key(args[0]) in self._parameters:
            self._ignore(output)
        apply_to_tensors(output, self._count)
        if func is _CAST and args[0].dtype == self._forward_dtype and storage_key(args[0]) in self._lifetimes:
            self._sources[storage_key(output)] = self._lifetimes[storage_key(args[0])]
        self._largest = max(self._largest, self._live)
        if self._is_in_step:
            self.timeline.append((self._live - self._live_gradients, self._live_gradients))
        return output

    def _ignore(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        self._known.add(key)
        weakref.finalize(tensor.untyped_storage(), self._known.discard, key)  # another storage may get the key

    def _correct(self, lifetime: _Lifetime, *, is_gradient: bool) -> None:
        """Count a storage in the timeline as a gradient, or not at all, and no longer as an activation."""
        more = lifetime.size if is_gradient else 0
        end = len(self.timeline) if lifetime.end is None else lifetime.end
        for index in range(lifetime.first, end):
            activations, gradients = self.timeline[index]
            self.timeline[index] = activations - lifetime.size, gradients + more

    def _count(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._known and key not in self._sizes:
            storage = tensor.untyped_storage()
            self._sizes[key] = storage.nbytes()
            if tensor.device.type == "meta":
                self._on_host.add(key)
                self._live_on_host += storage.nbytes()
                self.largest_on_host = max(self.largest_on_host, self._live_on_host)
            else:
                self._live += storage.nbytes()
            if self._forward_dtype is not None and self._is_in_step:
                self._lifetimes[key] = _Lifetime(storage.nbytes(), len(self.timeline))
            weakref.finalize(storage, self._forget, key)  # when its last tensor is gone, as an allocator frees it
        return tensor

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        self._sources.pop(key, None)
        lifetime = self._lifetimes.pop(key, None)
        if lifetime is not None:
            lifetime.end = len(self.timeline)
        if key in self._on_host:
            self._on_host.remove(key)
            self._live_on_host -= size
            return
        self._live -= size
        if key in self._gradients:
            self._gradients.remove(key)
            self._live_gradients -= size
