"""Choosing the devices of each machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import ClusterError, DeviceError, DstratError
from dstrat.resolve.ability import ability_of
from dstrat.resolve.choice import Choice

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.resolve.given import Given
    from dstrat.resolve.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenDevices:
    """The devices of each machine, and why.

    Attributes:
        indices: For the accelerator; None where the strategy was constructed with devices.
        count: How many on each machine.
        reason: Why, a few words.
    """

    indices: tuple[int, ...] | None
    count: int
    reason: str

    @property
    def choice(self) -> Choice:
        """The plan's line for it."""
        plain = self.indices in (None, tuple(range(self.count)))
        listed = "" if plain else f" ({', '.join(map(str, self.indices or ()))})"
        return Choice(subject="devices", value=f"{self.count}{listed}", reason=self.reason)


def choose_devices(
    given: Given | None, accelerator: Accelerator, *, started: int, num_nodes: int, strategy: Part[Strategy] | None
) -> ChosenDevices:
    """Choose the devices.

    Args:
        given: What the user gave; None takes as many as there are processes, or else all that there are.
        accelerator: The hardware.
        started: How many processes of the job exist already; 1 where dstrat starts them.
        num_nodes: Number of machines.
        strategy: The strategy that was asked for; None where none was.

    Raises:
        DeviceError: They are not there, or make no sense.
        ClusterError: The processes cannot be spread evenly over the machines.
    """
    if given is not None:
        return _as_given(given, accelerator)
    ability = ability_of(strategy) if strategy is not None else None
    if started > 1 and (ability is None or ability.starts_processes):
        if started % num_nodes:
            raise ClusterError(f"{started} processes were started, which num_nodes={num_nodes} cannot share evenly")
        return _counted(accelerator, started // num_nodes, "one for each process that was started")
    number = accelerator.auto_device_count()
    most = ability.max_devices if ability is not None else None
    if strategy is not None and most is not None and most < number:
        return _counted(accelerator, most, f"the most that {strategy.name} uses")
    return _counted(accelerator, number, "what 'auto' stands for")


def device_type(given: Given | None) -> str | None:
    """Return the type of the devices that a strategy was constructed with, such as ``"cuda"``.

    Raises:
        DeviceError: They are no devices, or of several types.
    """
    if given is None or not given.in_strategy:
        return None
    types = {str(getattr(device, "type", "")) for device in given.value}
    if len(types) != 1 or "" in types:
        raise DeviceError(f"{given.place} must be torch.devices of one type, and is {given.value!r}")
    return types.pop()


def _as_given(given: Given, accelerator: Accelerator) -> ChosenDevices:
    if given.in_strategy:
        return ChosenDevices(indices=None, count=len(given.value), reason=f"given to {given.place}")
    value = given.value
    if isinstance(value, bool | float):  # int() would take them
        raise DeviceError(f"{given.place} is of the type {type(value).__name__}: give a number, indices or 'auto'")
    return _parsed(accelerator, value, given.place, "asked for")


def _counted(accelerator: Accelerator, number: int, reason: str) -> ChosenDevices:
    return _parsed(accelerator, number, f"devices='auto', here {number},", reason)


def _parsed(accelerator: Accelerator, devices: Any, place: str, reason: str) -> ChosenDevices:
    try:
        indices = tuple(accelerator.parse_devices(devices))
    except DstratError:
        raise
    except Exception as error:  # a plugin's accelerator that leaves bad words to int()
        raise DeviceError(f"{place} makes no sense to {type(accelerator).__name__}: {error}") from error
    if not indices:
        raise DeviceError(f"{place} names no device: give at least one")
    return ChosenDevices(indices=indices, count=len(indices), reason=reason)
