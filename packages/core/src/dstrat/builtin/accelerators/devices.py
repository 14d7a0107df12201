"""Parsing of requested devices: counts, indices, "auto"."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dstrat.errors import DeviceError

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Devices

_FORMS = 'ask for "auto", a number such as 2, indices such as [0, 1] or "0,1", or -1 for all'
_NUMBER = re.compile(r"\s*-?[0-9]{1,9}\s*")


def parse_devices(devices: Devices, *, everything: int, limit: int, name: str) -> list[int]:
    """Return the indices of the requested devices.

    Args:
        devices: The request: ``"auto"``, ``4``, ``"4"``, ``-1``, ``[0, 1]`` or ``"0,1"``; ``"1,"`` is the device with
            index 1.
        everything: Number of devices for ``"auto"`` and ``-1``.
        limit: Largest number of devices.
        name: Name of the hardware in messages, such as ``"cuda"``.

    Raises:
        DeviceError: The devices do not exist, or the request is not understood.
    """
    if limit == 0:
        raise DeviceError(f"devices={devices!r} is not possible: this machine has no {name} device that torch can use")
    requested = _read_text(devices) if isinstance(devices, str) else _integer(devices)
    # Of a set the order, and so the device of each rank, would be arbitrary.
    if requested is None and isinstance(devices, Iterable) and not isinstance(devices, bytes | dict | set):
        indices = [_integer(index) for index in devices]
        requested = None if None in indices else [index for index in indices if index is not None]
    if requested is None:
        raise DeviceError(f"devices={devices!r} is not understood: {_FORMS}")
    if isinstance(requested, list):
        _check_indices(requested, devices, limit, name)
        return requested
    count = everything if requested == -1 else requested
    if count < 1:
        raise DeviceError(f"devices={devices!r} is not a number of {name} devices: {_FORMS}")
    if count > limit:
        raise DeviceError(
            f"devices={devices!r} is more than there are: at most {limit} {name} devices can be used here"
        )
    return list(range(count))


def _read_text(text: str) -> int | list[int]:
    """Return a number of devices (-1 for all) or a list of indices."""
    if text.strip() == "auto":
        return -1
    items = text.removesuffix(",").split(",")  # "1," is a list of one index
    if not all(_NUMBER.fullmatch(item) for item in items):
        raise DeviceError(f"devices={text!r} is not understood: {_FORMS}")
    numbers = [int(item) for item in items]
    return numbers if "," in text else numbers[0]


def _integer(value: object) -> int | None:
    if isinstance(value, bool):  # devices=True is a mistake, and not one device
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # an object without __index__ raises the TypeError
    except TypeError:
        return None


def _check_indices(indices: list[int], devices: object, limit: int, name: str) -> None:
    if not indices:
        raise DeviceError(f"devices={devices!r} names no device: {_FORMS}")
    if len(set(indices)) < len(indices):
        raise DeviceError(f"devices={devices!r} names a device twice: name each index once")
    missing = [index for index in indices if not 0 <= index < limit]
    if missing:
        raise DeviceError(
            f"devices={devices!r} names {name} {missing[0]}, which is not there: indices go from 0 to {limit - 1}"
        )
