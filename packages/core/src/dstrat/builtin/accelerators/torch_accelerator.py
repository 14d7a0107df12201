"""Accelerator for any type of device of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.interfaces.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices

_STATS = ("memory_allocated", "max_memory_allocated", "memory_reserved")


class TorchAccelerator(Accelerator):
    """Devices of one of torch's types: ``"cuda"``, ``"xpu"``, ``"mtia"``, or one that a package adds to torch.

    It uses what torch asks of a device's module, such as ``torch.xpu``, and the backend of collectives that is
    registered for the type.  Hardware that keeps to this needs no class of its own, only a record::

        Component(
            kind="accelerator",
            alias="npu",
            target="dstrat.accelerators:TorchAccelerator",
            options={"device_type": "npu"},
            summary="Ascend NPUs",
            requires=("torch_npu",),
            auto=60,
            device_type="npu",
            process_group_backend="hccl",
        )

    Args:
        device_type: Type of the devices.
    """

    has_streams = True

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    @property
    def process_group_backend(self) -> str:  # type: ignore[override]  # it depends on the type
        """Backend of ``torch.distributed`` for the type of device; ``"none"`` where no backend is registered."""
        try:
            return dist.get_default_backend_for_device(self.device_type)
        except (AttributeError, ValueError, RuntimeError):  # also of a torch without torch.distributed
            return "none"

    @property
    def _module(self) -> Any:
        """Module of torch for the type of device; None where no installed package adds it."""
        return getattr(torch, self.device_type, None)

    def is_available(self) -> bool:
        return self.auto_device_count() > 0  # is_available() of some modules initializes the driver

    def hint_unavailable(self) -> str | None:
        if self._module is None:
            return f"torch has no module torch.{self.device_type}: install the package that adds this type of device"
        return None

    def auto_device_count(self) -> int:
        return 0 if self._module is None else int(self._module.device_count())

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        return parse_devices(devices, everything=count, limit=count, name=self.device_type)

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device(self.device_type, index) for index in indices]

    def setup(self, device: torch.device | None = None) -> None:
        index = 0 if device is None or device.index is None else device.index
        self._module.set_device(index)  # collectives and new tensors use the current device

    def get_device_name(self, device: torch.device) -> str:
        function = getattr(self._module, "get_device_name", None)
        return "" if function is None else str(function(device))

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return bytes of memory: allocated, largest allocated so far, and reserved by torch."""
        functions = {name: getattr(self._module, name, None) for name in _STATS}
        return {name: float(function(device)) for name, function in functions.items() if function is not None}

    def memory_summary(self, device: torch.device) -> str:
        return "\n".join(f"{name}: {size / 2**20:.0f} MiB" for name, size in self.get_device_stats(device).items())

    def get_random_state(self, device: torch.device) -> Tensor | None:
        state: Tensor = self._module.get_rng_state(device)
        return state

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        self._module.set_rng_state(state, device)

    def teardown(self) -> None:
        is_initialized = getattr(self._module, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            self._module.empty_cache()
