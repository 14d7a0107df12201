"""Values of an option, by the type that its group states."""

from __future__ import annotations

import os
from typing import Any

from dstrat.errors import RequestError

_LEAST = {
    "reduce_bucket_size": 1,
    "params_buffer_count": 1,
    "params_buffer_size": 1,
    "optimizer_buffer_count": 1,
    "block_size": 1,
    "queue_depth": 1,
    "thread_count": 1,
    "loss_scale_window": 1,
    "hysteresis": 1,
}


def possible_value(name: str, value: Any, kind: str) -> Any:
    """Return the value of an option as DeepSpeed takes it, such as a whole number for ``5e8``.

    Args:
        name: Of the option.
        value: What the user gave.
        kind: The annotation of the option, as text.

    Raises:
        RequestError: The option cannot have the value.
    """
    if name == "stage":
        return possible_stage(value, f"stage {value!r} of ZeRO is not possible")
    if kind == "bool" and not isinstance(value, bool):
        raise RequestError(f"{name} {value!r} is not possible: give True or False")
    if kind.startswith("Device") and value not in ("cpu", "nvme") and not (kind.endswith("None") and value is None):
        raise RequestError(f"{name} {value!r} is not possible: choose 'cpu' or 'nvme'")
    if kind == "str":
        return _text(name, value)
    return _number(name, value, is_whole=kind == "int") if kind in ("int", "float") else value


def possible_stage(value: Any, complaint: str) -> int:
    """Return a stage of ZeRO.

    Raises:
        RequestError: It is none; the message begins with the complaint.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 3:
        raise RequestError(f"{complaint}: choose 0, 1, 2 or 3")
    return int(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise RequestError(f"{name} {value!r} is not possible: give the path of a folder")
    return str(os.fspath(value))


def _number(name: str, value: Any, *, is_whole: bool) -> int | float:
    least = _LEAST.get(name, 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= least or (is_whole and value % 1):
        raise RequestError(
            f"{name} {value!r} is not possible: give a {'whole ' if is_whole else ''}number from {least} on"
        )
    return int(value) if is_whole else value
