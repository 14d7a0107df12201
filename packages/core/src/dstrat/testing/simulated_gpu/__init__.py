"""A simulated GPU for tests on machines without one: torch's device type ``simgpu``.

Its memory is the CPU's, and its rules are those of a GPU.  With ``DSTRAT_SIMULATED_GPUS=2`` in the environment a
machine has two, and ``Trainer(accelerator="simulated_gpu", devices=2)`` trains on them.  What a CPU does not show
becomes an error or a wrong number:

- a copy between pinned memory and the device that nobody waited for has not happened;
- memory of another stream, used without waiting for that stream, raises; so does an allocation that may reuse memory
  which was freed while another stream still uses it;
- each wait of the host for the device is counted, with its stack: :func:`synchronizations`;
- tensors of the device and of the CPU do not mix; memory can be limited; a forked process cannot use the device;
- collectives run in a stream of their own, over gloo.

It says nothing about speed.  The first use compiles ``simulated_gpu.cpp``, once for each torch: a minute, with a C++
compiler.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES = "DSTRAT_SIMULATED_GPUS"
"""Environment variable: how many simulated GPUs the machine has.  Without it the accelerator is not offered."""
DEVICE_TYPE = "simgpu"
"""Type of its devices: letters only, as device meshes want it."""
BACKEND = "simulated_ccl"
"""Backend of its collectives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Synchronization:
    """A wait of the host for the device.

    Attributes:
        cause: Operation that waited, such as ``"item"`` or ``"a copy to the host"``.
        stack: Python's stack of the thread, as text; of a thread of autograd, only what is Python there.
    """

    cause: str
    stack: str


@cache
def load() -> Any:
    """Add the type of device to torch in this process, and return the compiled part; no device is initialized."""
    import torch
    import torch.distributed as dist

    from dstrat.testing.simulated_gpu import device_module, extension

    native = extension.load()
    native.set_num_devices(int(os.environ.get(DEVICES, "1")))
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch._register_device_module(DEVICE_TYPE, device_module)  # noqa: SLF001 - how a backend adds its module
    torch.utils.generate_methods_for_privateuse1_backend()
    device_module.native = native
    if dist.is_available():
        dist.Backend.register_backend(BACKEND, _process_group, extended_api=True, devices=[DEVICE_TYPE])
    return native


def _process_group(backend: Any, _options: Any) -> Any:
    import torch.distributed as dist

    store = dist.PrefixStore("gloo", backend.store)
    gloo = dist.ProcessGroupGloo(store, backend.group_rank, backend.group_size, backend.timeout)
    return load().ProcessGroup(gloo, backend.group_rank, backend.group_size)


@contextmanager
def synchronizations() -> Iterator[list[Synchronization]]:
    """Collect the waits of the host for the device, in all threads of the process.

    For example::

    with synchronizations() as waits:
        train_one_step()
    assert not waits, waits[0].stack
    """
    waits: list[Synchronization] = []

    def record(cause: str) -> None:
        frame = sys._getframe(1) if sys._getframe().f_back else None  # noqa: SLF001 - a thread of autograd may have none
        stack = "".join(traceback.format_list(traceback.extract_stack(frame))) if frame else ""
        waits.append(Synchronization(cause=cause, stack=stack))

    native = load()
    native.set_on_synchronization(record)
    try:
        yield waits
    finally:
        native.set_on_synchronization(None)


@contextmanager
def limited_memory(num_bytes: int, device: int = 0) -> Iterator[None]:
    """Raise ``torch.OutOfMemoryError`` where a device would hold more bytes than this."""
    native = load()
    native.limit_memory(device, num_bytes)
    try:
        yield
    finally:
        native.limit_memory(device, 0)


def touched_devices() -> list[int]:
    """Return the devices that this process has ever had memory of: a GPU has a context of the process there."""
    native = load()
    return [index for index in range(native.num_devices()) if native.memory(index)["is_touched"]]
