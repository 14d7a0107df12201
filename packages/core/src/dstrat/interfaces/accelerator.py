"""Interface of accelerators: one type of hardware."""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dstrat.interfaces.precision import Precision

Devices = int | str | Sequence[int]
"""Requested devices: ``4``, ``"4"``, ``-1``, ``"auto"``, ``[0, 1]``, ``"0,1"``."""

GraphEnd = Literal["backward", "optimizer_step", "evaluation_step"]
"""End of a graph of recorded operations: after a backward pass, or after a step of the optimizer or of evaluation."""


class Accelerator(ABC):
    """One type of hardware: its devices, and their set-up in a process.

    The process that plans the job constructs it, and calls :meth:`is_available`, :meth:`parse_devices` and
    :meth:`get_parallel_devices`, which must be overridden like :meth:`auto_device_count`.  They must not initialize the
    hardware: that process may be forked, which most drivers do not survive.  Each rank then calls :meth:`setup`, and
    :meth:`teardown` at the end.  No method communicates.  The smallest complete subclass::

        class MyAccelerator(Accelerator):
            process_group_backend = "gloo"

            def is_available(self):
                return True

            def auto_device_count(self):
                return 1

            def parse_devices(self, devices):
                return list(range(int(devices)))

            def get_parallel_devices(self, indices):
                return [torch.device("cpu") for _ in indices]
    """

    process_group_backend: str = "none"
    """Name of the backend that carries tensors of this hardware, such as ``"gloo"``; ``"none"`` where it has none."""

    supports_torch_distributed: bool = True
    """Whether ``torch.distributed`` can use that backend, so that strategies of others run on this hardware."""

    devices_share_process: bool = True
    """Whether one process can drive several devices of this hardware."""

    averages_in_collectives: bool = True
    """Whether the backend of its collectives has a mean; strategies sum and divide where it has none."""

    has_streams: bool = False
    """Whether ``torch.Stream`` and ``torch.Event`` serve it, and copies from pinned memory run beside computation.

    Batches are copied ahead then, and copies from the host are queued without waiting for the device.
    """

    @abstractmethod
    def is_available(self) -> bool:
        """Return whether this machine has such hardware and torch can use it."""

    def hint_unavailable(self) -> str | None:
        """Return why the hardware is not available, and what to do; None if unknown."""
        return None

    def describe(self) -> str | None:
        """Return the runtime of the hardware and its version, for display; None if torch drives it."""
        return None

    @abstractmethod
    def auto_device_count(self) -> int:
        """Return how many devices ``"auto"`` stands for."""

    @abstractmethod
    def parse_devices(self, devices: Devices) -> list[int]:
        """Return the indices of the requested devices; most subclasses call :func:`dstrat.parse_devices`.

        Raises:
            DeviceError: The devices do not exist, or the request is not understood.
        """

    @abstractmethod
    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        """Return one ``torch.device`` for each index, in the order of the local ranks."""

    def device_in_process(self, device: torch.device) -> torch.device:
        """Return the name of a device within its process.

        Args:
            device: One of :meth:`get_parallel_devices`; on hardware that shows each process a single device it is
                ``"type:0"`` there.
        """
        return device

    def supports_dtype(self, dtype: torch.dtype) -> bool:  # most hardware computes in all dtypes
        """Return whether the hardware computes in this floating-point dtype."""
        return True

    def precision_for(self, flag: str) -> Precision | None:  # most hardware has no classes of its own
        """Return the precision that this hardware wants for a flag; None where the catalog's serves."""
        return None

    def setup(self, device: torch.device | None = None) -> None:
        """Prepare the device in this process, before communication is opened.

        Args:
            device: The device of this rank, one of :meth:`get_parallel_devices`; None for the only one.
        """

    def end_graph(self, after: GraphEnd) -> None:
        """Run the recorded operations, on hardware that records operations before it runs them.

        The Trainer and OwnLoop call it after each backward pass, each optimizer step and each evaluation step;
        strategies do not.  It does nothing by default, and then the Trainer does not call it.

        Args:
            after: The operation that was recorded last; hardware whose graphs span a full step does nothing after
                ``"backward"``.
        """

    def get_device_name(self, device: torch.device) -> str:  # not all hardware has models
        """Return the name of the device's model, such as ``"NVIDIA H100 80GB HBM3"``; empty where it has none.

        This method and the next four get the device by its name in the process, see :meth:`device_in_process`.
        """
        return ""

    def get_device_stats(self, device: torch.device) -> dict[str, float]:  # not all hardware counts
        """Return statistics of the hardware, such as bytes of memory in use, by name."""
        return {}

    def memory_summary(self, device: torch.device) -> str:  # not all hardware counts
        """Return what takes the memory of a device, for people; empty where that is not known."""
        return ""

    def get_random_state(self, device: torch.device) -> Tensor | None:  # the CPU's belongs to torch
        """Return the state of the hardware's random number generator, uint8 on the CPU; None if it has none."""
        return None

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Set a state that :meth:`get_random_state` returned."""

    def teardown(self) -> None:
        """Release the resources of :meth:`setup`; a later run in the same process calls that again."""


def initialized_device_type() -> str | None:
    """Return the type of device that this process has initialized; None if there is none, or torch is not imported.

    Most drivers do not survive a fork: copies of this process could not use the device.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    current = torch.accelerator.current_accelerator()  # the one that torch is built for, or a plugin adds
    if current is None:
        return None
    module = torch.get_device_module(current)
    is_initialized = getattr(module, "is_initialized", None)  # MPS has none
    is_used = (is_initialized is not None and is_initialized()) or (
        # Where the driver was only asked, a machine without a device, whose torch is built for one, loses nothing.
        _is_unusable_after_fork(module) and module.is_available()
    )
    return current.type if is_used else None


def reason_against_fork() -> str | None:
    """Return why ranks that are forked from this process could not train; None if they can."""
    device_type = initialized_device_type()
    if device_type is not None:
        return f"{device_type!r} has been initialized in this process, as copies of it cannot use it"
    # The first backward pass, also one on the CPU, starts a thread for each device that torch sees.
    for path in Path("/proc/self/task").glob("*/comm"):  # of Linux; elsewhere torch raises an error in the ranks
        with suppress(OSError):  # the thread has ended
            if path.read_text().startswith("pt_autograd"):
                return "a backward pass in this process beside a GPU, as torch refuses them in copies of it"
    return None


def _is_unusable_after_fork(module: Any) -> bool:
    """Return whether torch would refuse a device in a copy of this process, by a copy that does nothing else.

    Args:
        module: Torch's module of the type of device.
    """
    # torch.cuda.is_available() uses the driver too, and does not initialize the device.
    is_in_bad_fork = getattr(module, "_is_in_bad_fork", None)
    if is_in_bad_fork is None:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12 about threads, of which the copy has none
        pid = os.fork()
    if pid == 0:
        os._exit(int(is_in_bad_fork()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
