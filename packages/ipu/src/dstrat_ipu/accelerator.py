"""Accelerator for Graphcore's IPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.errors import DeviceError
from dstrat.interfaces.accelerator import Accelerator
from dstrat_ipu import runtime
from dstrat_ipu.precision import IPUPrecision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.precision import Precision


class IPUAccelerator(Accelerator):
    """Graphcore's IPUs, which one process drives together.

    ``"auto"`` is as many as there are.  poptorch reserves a power of two, so that other numbers are refused, and
    chooses the devices itself: indices other than the first ones have no meaning.
    """

    process_group_backend = "none"  # replicas exchange gradients within the compiled step
    supports_torch_distributed = False

    def is_available(self) -> bool:
        return self.hint_unavailable() is None

    def hint_unavailable(self) -> str | None:
        try:
            count = runtime.num_ipus()
        except DeviceError as error:
            return str(error)
        return None if count else "poptorch sees no IPU: see what gc-info -l lists, and whether the driver is loaded"

    def auto_device_count(self) -> int:
        return runtime.num_ipus()

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        indices = parse_devices(devices, everything=count, limit=count, name="ipu")
        if indices != list(range(len(indices))):  # they only say how many
            raise DeviceError(
                f"devices={devices!r} names IPUs, and poptorch chooses them itself: give their number, such as "
                f"{len(indices)}"
            )
        if len(indices) & (len(indices) - 1):  # no power of two
            raise DeviceError(
                f"devices={devices!r} is {len(indices)} IPUs, and poptorch reserves 1, 2, 4, 8 ...: give one of these"
            )
        return indices

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        # Labels: no tensor is ever on one, as poptorch itself copies what a call needs.
        return [torch.device("ipu", index) for index in indices]

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16)

    def precision_for(self, flag: str) -> Precision | None:
        return IPUPrecision(flag) if flag in ("32-true", "16-true") else None
