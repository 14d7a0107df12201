"""Accelerator for Intel Gaudi."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.errors import DeviceError
from dstrat.interfaces.accelerator import Accelerator
from dstrat_hpu import runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices, GraphEnd


class HPUAccelerator(Accelerator):
    """Intel Gaudi (HPU), through ``habana_frameworks.torch``.

    A process holds one device, from its first use until the process ends, and calls it ``hpu:0``, whichever it is.
    Indices count what ``HABANA_VISIBLE_MODULES`` names, or all modules.  A process whose launcher has set
    ``HLS_MODULE_ID`` uses that module.
    """

    process_group_backend = "hccl"
    devices_share_process = False
    averages_in_collectives = False
    _ends_graphs = False

    def is_available(self) -> bool:
        return self.hint_unavailable() is None

    def hint_unavailable(self) -> str | None:
        try:
            count = runtime.num_devices()
        except DeviceError as error:
            return str(error)
        return None if count else "the driver shows no device: see hl-smi, and whether the container may use them"

    @staticmethod
    def is_lazy() -> bool:
        """Return whether operations are recorded, and run when a graph ends (``PT_HPU_LAZY_MODE``)."""
        return runtime.is_lazy()

    def auto_device_count(self) -> int:
        return runtime.num_devices()

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        return parse_devices(devices, everything=count, limit=count, name="hpu")

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device("hpu", index) for index in indices]

    @override
    def device_in_process(self, device: torch.device) -> torch.device:
        return torch.device("hpu", 0)

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Return whether Gaudi computes in the dtype: not in float64, which it keeps as float32."""
        return dtype is not torch.float64

    def setup(self, device: torch.device | None = None) -> None:
        """Acquire the device; when this happens first, let its random numbers follow from torch's seed.

        Raises:
            DeviceError: It is in use, or is not the one that this process holds.
        """
        if runtime.acquire(0 if device is None or device.index is None else device.index):
            runtime.hpu().random.manual_seed(torch.initial_seed() % 2**63)
        self._ends_graphs = runtime.is_lazy()  # the mode never changes, and end_graph runs in each step

    @override
    def end_graph(self, after: GraphEnd) -> None:
        """End the graph, and let the device run it; the process goes on at once.  In eager mode there is none."""
        if self._ends_graphs:
            runtime.mark_step()

    @override
    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return bytes of memory, and counts of allocations, compiled graphs and operations that ran on the host."""
        stats = runtime.hpu().memory_stats()
        names = {
            "InUse": "memory_used",
            "MaxInUse": "max_memory_used",
            "Limit": "memory_limit",
            "NumAllocs": "allocations",
            "NumFrees": "frees",
        }
        memory = {name: float(stats[key]) for key, name in names.items() if key in stats}
        counts = {"graph_compilation": "graph_compilations", "cpu_fallback": "cpu_fallbacks"}
        metrics = {name: runtime.count_of(metric) for metric, name in counts.items()}
        return memory | {name: float(count) for name, count in metrics.items() if count is not None}

    @override
    def get_random_state(self, device: torch.device) -> Tensor | None:
        state: Tensor = runtime.hpu().random.get_rng_state()
        return state

    @override
    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        runtime.hpu().random.set_rng_state(state)
