"""The simulated machine of this process: how many devices it has, and who holds them."""

import os
import tempfile
from pathlib import Path

from dstrat.testing.simulated_gpu import extension
from habana_frameworks.torch.utils.internal import is_lazy

DEVICES = "HABANA_SIMULATOR_DEVICES"
"""How many devices the machine has; 8 where it is not set."""
MACHINE = "HABANA_SIMULATOR_MACHINE"
"""The folder of the machine: processes with the same one share its devices."""


def num_devices() -> int:
    return int(os.environ.get(DEVICES, "8"))


def _machine() -> Path:
    folder = Path(os.environ.get(MACHINE) or Path(tempfile.gettempdir()) / f"habana-simulator-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


simulator = extension.load(Path(__file__).with_name("_simulator.cpp"))


def configure() -> None:
    """Pass on what the environment says now; this is repeated before the device is acquired."""
    simulator.configure(str(_machine()), num_devices(), is_lazy())


configure()
