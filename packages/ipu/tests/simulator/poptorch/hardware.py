"""Simulated IPUs: how many there are, who holds them, and what is counted.

A process waits for IPUs or fails to acquire them (graphcore/poptorch, popart_compiler/source/CompilerImpl.cpp); a
number of IPUs that is no power of two is refused there too.
"""

from __future__ import annotations

import dataclasses
import os

from .errors import Error

IPUS = "POPTORCH_SIMULATED_IPUS"


@dataclasses.dataclass
class Counts:
    """What the simulated host and devices have done.

    Attributes:
        compilations: Graphs compiled.
        calls: Runs of a graph, each with one transfer of its inputs and one of its outputs.
        weights_to_host: Copies of all weights to the host.
        weights_to_device: Copies of all weights to the device.
        state_to_host: Copies of the optimizer's state to the host.
        state_to_device: Copies of the optimizer's state to the device.
        optimizer_updates: Hyperparameters sent to the device.
        attachments: Times that a graph was loaded onto its devices.
    """

    compilations: int = 0
    calls: int = 0
    weights_to_host: int = 0
    weights_to_device: int = 0
    state_to_host: int = 0
    state_to_device: int = 0
    optimizer_updates: int = 0
    attachments: int = 0

    def copy(self) -> Counts:
        return dataclasses.replace(self)

    def since(self, before: Counts) -> Counts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(before), strict=True)
        return Counts(*(now - then for now, then in pairs))


counts = Counts()
_held: dict[int, int] = {}  # by the identity of an executor


def num_ipus() -> int:
    """Return the number of IPUs of the machine."""
    return int(os.environ.get(IPUS, "0"))


def rounded(wanted: int, *, auto_round: bool) -> int:
    """Return the number of IPUs that are reserved for so many."""
    power = 1 << (wanted - 1).bit_length()
    if power != wanted and not auto_round:
        raise Error(
            f"The model specifies the use of {wanted} IPUs, however PopTorch must reserve a minimum of {power} in "
            "order to allow the model to run. Please reconfigure your model to use a different number of IPUs or set "
            "poptorch.Options().autoRoundNumIPUs(True)."
        )
    return power


def acquire(owner: int, wanted: int) -> None:
    """Reserve IPUs, or raise as with ``POPTORCH_WAIT_FOR_IPU=0``."""
    free = num_ipus() - sum(_held.values())
    if wanted > num_ipus():
        raise Error(f"Failed to acquire {wanted} IPU(s): only {num_ipus()} in the system")
    if wanted > free:
        raise Error(f"Failed to acquire {wanted} IPU(s): {free} free, the others are in use")
    _held[owner] = wanted
    counts.attachments += 1


def release(owner: int) -> None:
    """Give IPUs back."""
    _held.pop(owner, None)
