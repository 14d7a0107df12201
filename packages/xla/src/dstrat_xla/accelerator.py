"""Accelerators for the devices that XLA's runtime drives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from dstrat.builtin.accelerators.cpu import MOST_PROCESSES
from dstrat.builtin.accelerators.devices import parse_devices
from dstrat.errors import DeviceError
from dstrat.interfaces.accelerator import Accelerator
from dstrat_xla import runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat.interfaces.accelerator import Devices, GraphEnd

_SEED_BYTES = 8  # XLA's random state is one number, and portable checkpoints store tensors


class XLAAccelerator(Accelerator):
    """Devices of XLA's runtime (PJRT), of the type that ``PJRT_DEVICE`` names: TPU, NEURON or CPU.

    On the CPU ``"auto"`` is one device.  Several devices are processes with one device each, or devices of one process,
    depending on the strategy; ``CPU_NUM_DEVICES`` sets the number of devices of a process.
    """

    process_group_backend = "xla"
    supports_torch_distributed = False  # its backend reports one process even if torchrun has started several

    def is_available(self) -> bool:
        return self.hint_unavailable() is None

    def hint_unavailable(self) -> str | None:
        try:
            runtime.torch_xla()
        except DeviceError as error:
            return str(error)
        return None

    def describe(self) -> str:
        return f"{runtime.PJRT_DEVICE} {runtime.pjrt_device()}, torch_xla {runtime.torch_xla().__version__}"

    def auto_device_count(self) -> int:
        return runtime.num_devices()

    def parse_devices(self, devices: Devices) -> list[int]:
        count = self.auto_device_count()
        limit = MOST_PROCESSES if runtime.pjrt_device() == "CPU" else count
        return parse_devices(devices, everything=count, limit=limit, name=f"xla ({runtime.pjrt_device()})")

    def get_parallel_devices(self, indices: Sequence[int]) -> list[torch.device]:
        return [torch.device("xla", index) for index in indices]

    def setup(self, device: torch.device | None = None) -> None:
        """Start the runtime, and seed the device's random numbers from torch's seed."""
        torch_xla = runtime.torch_xla()
        torch_xla.device(None if device is None else device.index)
        torch_xla.manual_seed(torch.initial_seed() % 2**63, device)  # torch's seed may have 64 bits
        runtime.check_autograd()

    def end_graph(self, after: GraphEnd) -> None:
        """Run the recorded operations, backward pass and optimizer step as one graph, without waiting for them."""
        if after != "backward":
            runtime.cut()

    def get_device_stats(self, device: torch.device) -> dict[str, float]:
        """Return bytes of memory, if the runtime counts them: in use, largest in use so far, and total."""
        try:
            memory = runtime.xla_model().get_memory_info(device)
        except RuntimeError:  # not on the CPU
            return {}
        names = {"bytes_used": "memory_used", "peak_bytes_used": "max_memory_used", "bytes_limit": "memory_limit"}
        return {name: float(memory[key]) for key, name in names.items() if key in memory}

    def get_random_state(self, device: torch.device) -> Tensor | None:
        seed = int(runtime.xla_model().get_rng_state(str(device))) % 2 ** (8 * _SEED_BYTES)
        return torch.tensor(list(seed.to_bytes(_SEED_BYTES, "little")), dtype=torch.uint8)

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        runtime.xla_model().set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), str(device))


class TPUAccelerator(XLAAccelerator):
    """Google's TPUs."""

    def is_available(self) -> bool:
        return runtime.may_have_tpu() and super().is_available() and runtime.num_tpus() > 0

    def hint_unavailable(self) -> str | None:
        kind = os.environ.get(runtime.PJRT_DEVICE, "TPU")
        if kind != "TPU":
            return f"{runtime.PJRT_DEVICE} is {kind!r}; unset it, or choose accelerator='xla'"
        return super().hint_unavailable() if runtime.may_have_tpu() else None

    def auto_device_count(self) -> int:
        return runtime.num_tpus()
