"""Adapter to habana_frameworks.torch: loading it, its graphs, and the device of this process.

Written against the vendor's sources (HabanaAI/gaudi-pytorch-bridge, releases 1.18 to 1.22).
"""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULE_ID = "HLS_MODULE_ID"
VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
_WRITTEN_BY_IMPORT = ("MASTER_ADDR", "MASTER_PORT")
_MACHINE = 8  # modules of a machine without containers

_held: int | None = None  # the index of the device that this process has acquired


def load() -> Any:
    """Return the module ``habana_frameworks.torch``, which is imported on first use.

    Raises:
        DeviceError: It cannot be loaded.
    """
    try:
        with _environment_restored():
            return importlib.import_module("habana_frameworks.torch")
    except Exception as error:  # what a library of another version raises is of many kinds
        advice = (
            "set PT_HPU_LAZY_MODE=0, or use the torch of the vendor's image"
            if "Lazy mode" in str(error)
            else "install the vendor's torch and plugin of one release, as its installation guide says"
        )
        raise DeviceError(
            f"habana_frameworks cannot be loaded with torch {torch.__version__} "
            f"({type(error).__name__}: {error}): {advice}"
        ) from error


@contextmanager
def _environment_restored() -> Iterator[None]:
    """Unset what the import says of a job that is not there: other processes would inherit it."""
    before = {name: os.environ.get(name) for name in _WRITTEN_BY_IMPORT}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


def hpu() -> Any:
    """Return the module of devices, memory and random numbers, which torch knows as ``torch.hpu``."""
    load()
    return importlib.import_module("habana_frameworks.torch.hpu")


def is_lazy() -> bool:
    """Return whether operations are recorded, and run when a graph ends."""
    load()
    return bool(importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy())


def mark_step() -> None:
    """End the graph, and let the device run it; nothing in eager mode."""
    load()
    importlib.import_module("habana_frameworks.torch.core").mark_step()


def num_devices() -> int:
    """Return the number of devices that this process may choose from."""
    return int(hpu().device_count())


def visible_modules(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the modules of the machine that can be used, in the order of their indices."""
    listed = environ.get(VISIBLE_MODULES)
    return [int(module) for module in listed.split(",")] if listed else list(range(num_devices()))


def acquire(index: int) -> None:
    """Take a device for this process, which holds it until it ends, and can hold no other.

    Args:
        index: Counts what is visible.  A process whose launcher has set ``HLS_MODULE_ID`` has its device already.

    Raises:
        DeviceError: It is in use, or this process holds another one.
    """
    global _held  # noqa: PLW0603 - a fact of the process, as the vendor's library has it
    devices, chosen = hpu(), os.environ.get(MODULE_ID)
    if _held is not None and _held != index:
        raise DeviceError(
            f"this process holds hpu {_held} until it ends, and cannot take hpu {index}: run it in another process"
        )
    if _held is None:
        modules = _set_module(devices, index, chosen)
        try:
            devices.init()
        except RuntimeError as error:
            name = f"hpu {index}" if chosen is None else f"module {chosen}, which {MODULE_ID} names,"
            raise DeviceError(
                f"{name} cannot be acquired ({str(error).splitlines()[0]}): another process holds it, as hl-smi shows, "
                f"or it is not there; choose among devices {modules}, or end the other process"
            ) from error
        finally:
            if chosen is None:
                os.environ.pop(MODULE_ID, None)  # processes that this one starts have devices of their own
        _held = index


def _set_module(devices: Any, index: int, chosen: str | None) -> list[int]:
    """Let the device that is acquired next be that one, and return the indices that there are."""
    modules = list(range(num_devices()))
    # Of fewer than all modules nobody knows the numbers: the driver gives any that is free.
    is_known = VISIBLE_MODULES in os.environ or len(modules) >= _MACHINE
    if chosen is None and (is_known or index != 0):
        try:
            devices.set_device(index)
        except AssertionError as error:
            raise DeviceError(
                f"hpu {index} cannot be chosen ({error}): set {VISIBLE_MODULES} to the modules of this machine, such "
                f"as {VISIBLE_MODULES}=0,1,2,3"
            ) from error
    return modules
