"""Adapter to habana_frameworks.torch: loading it, its graphs, and the device of this process.

Written against the vendor's sources (HabanaAI/gaudi-pytorch-bridge).  The torch that dstrat needs
came with release 1.23.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MODULE_ID = "HLS_MODULE_ID"
VISIBLE_MODULES = "HABANA_VISIBLE_MODULES"
_PLUGIN = "habana_frameworks.torch"
_WRITTEN_BY_IMPORT = ("MASTER_ADDR", "MASTER_PORT", MODULE_ID, "ID")
_DEFAULT_ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "12345"}
_MACHINE = 8  # modules of a machine without containers

_held: int | None = None  # the index of the device that this process has acquired
_cleaned = False  # the environment, of what the vendor's package wrote when torch imported it


def load() -> Any:
    """Return the module ``habana_frameworks.torch``, which is imported on first use.

    Raises:
        DeviceError: It cannot be loaded.
    """
    try:
        with _environment_restored():
            return importlib.import_module(_PLUGIN)
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
    """Undo what the import writes for a job by its conventions: other processes would inherit it."""
    if _PLUGIN in sys.modules:
        _remove_defaults()
    before = {name: os.environ.get(name) for name in _WRITTEN_BY_IMPORT}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _remove_defaults() -> None:
    """Remove from the environment, once, what the package wrote when torch imported it by itself, in eager mode."""
    global _cleaned  # noqa: PLW0603 - a fact of the process
    if _cleaned:
        return
    _cleaned = True
    if "RANK" not in os.environ and _DEFAULT_ADDRESS.items() <= os.environ.items():
        for name in _DEFAULT_ADDRESS:
            del os.environ[name]
    if os.environ.get("ID") == os.environ.get("RANK"):
        os.environ.pop("ID", None)
    # A launcher that sets the module of the local rank sets what the default is, too.
    is_default = os.environ.get(MODULE_ID) == _module_of_rank(os.environ)
    if is_default and not importlib.import_module(f"{_PLUGIN}.hpu").is_initialized():
        os.environ.pop(MODULE_ID, None)


def _module_of_rank(environ: Mapping[str, str]) -> str | None:
    """Return the module that the vendor's package gives to a process by its local rank; None outside of jobs."""
    if "LOCAL_RANK" not in environ or environ.get("WORLD_SIZE", "1") == "1":
        return None
    rank, listed = int(environ["LOCAL_RANK"]), environ.get(VISIBLE_MODULES)
    modules = listed.split(",") if listed else [str(module) for module in range(rank + 1)]
    return modules[rank] if rank < len(modules) else None


def hpu() -> Any:
    """Return the module of devices, memory and random numbers, which torch knows as ``torch.hpu``."""
    load()
    return importlib.import_module("habana_frameworks.torch.hpu")


def is_lazy() -> bool:
    """Return whether operations are recorded, and run when a graph ends."""
    load()
    # Asked of the library, as the variable may have changed since it was read.
    return bool(importlib.import_module("habana_frameworks.torch.utils.internal").is_lazy())


def mark_step() -> None:
    """End the graph, and let the device run it; nothing in eager mode."""
    _core().mark_step()


@functools.cache  # mark_step runs in each step
def _core() -> Any:
    load()
    return importlib.import_module("habana_frameworks.torch.core")


def count_of(metric: str) -> int | None:
    """Return the count of one of the vendor's metrics since the process began; None in a release without it."""
    load()
    try:
        metrics = importlib.import_module("habana_frameworks.torch.hpu.metrics")
    except ImportError:
        return None
    collected = metrics.metric_global(metric)
    number = None if collected is None else dict(collected.stats()).get("TotalNumber")
    return None if number is None else int(number)


def num_devices() -> int:
    """Return the number of devices that this process may choose from."""
    return int(hpu().device_count())


def visible_modules(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the modules of the machine that can be used, in the order of their indices."""
    listed = environ.get(VISIBLE_MODULES)
    return [int(module) for module in listed.split(",")] if listed else list(range(num_devices()))


def acquire(index: int) -> bool:
    """Take a device for this process, which holds it until it ends, and can hold no other.

    Args:
        index: Counts what is visible.  With 0, a process whose launcher has set ``HLS_MODULE_ID`` takes that module,
            and one that has used a device before keeps it.

    Returns:
        Whether it was acquired by this call.

    Raises:
        DeviceError: It is in use, this process holds another one, or its launcher has named another one; or gradients
            cannot be computed on it.
    """
    global _held  # noqa: PLW0603 - a fact of the process, as the vendor's library has it
    devices = hpu()
    if _held is not None and _held != index:
        raise DeviceError(
            f"this process holds hpu {_held} until it ends, and cannot take hpu {index}: run it in another process"
        )
    if _held is not None:
        return False
    by_launcher = os.environ.get(MODULE_ID)
    if devices.is_initialized() and by_launcher is None and index != 0:
        raise DeviceError(
            f"this process has used a device of Gaudi before, and it is not known to be hpu {index}: make no tensors "
            f"on 'hpu' before training begins, or set {MODULE_ID} for each process"
        )
    module = _find_module(index, by_launcher)
    is_new = not devices.is_initialized()
    if is_new:
        _initialize(devices, index, module, by_launcher)
    _held = index
    _check_gradients()
    return is_new


def _find_module(index: int, by_launcher: str | None) -> str | None:
    """Return the module of an index; None takes any that is free."""
    modules = visible_modules()
    if index >= len(modules):
        raise DeviceError(f"hpu {index} is not there: choose among devices {list(range(len(modules)))}")
    # Of fewer than all modules the numbers are unknown: the driver gives any that is free.
    is_known = VISIBLE_MODULES in os.environ or len(modules) >= _MACHINE
    if by_launcher is not None:
        if is_known and index != 0 and by_launcher != str(modules[index]):
            raise DeviceError(
                f"{MODULE_ID} is {by_launcher} in this process, and hpu {index} is module {modules[index]}: unset "
                f"{MODULE_ID}, and dstrat chooses the module, or let the launcher set it to {modules[index]}"
            )
        return by_launcher
    if is_known or _module_of_rank(os.environ) == str(index):
        return str(modules[index])
    if index != 0:
        raise DeviceError(
            f"hpu {index} cannot be chosen, as the numbers of the {len(modules)} modules are not known: set "
            f"{VISIBLE_MODULES} to the modules of this machine, such as {VISIBLE_MODULES}=0,1,2,3"
        )
    return None


def _initialize(devices: Any, index: int, module: str | None, by_launcher: str | None) -> None:
    # The vendor's set_device would do, but torch.hpu.device would then write another module when it is left.
    if module is not None:
        os.environ[MODULE_ID] = module
    try:
        devices.init()
    except RuntimeError as error:
        name = f"hpu {index}" if by_launcher is None else f"module {module}, which {MODULE_ID} names,"
        raise DeviceError(
            f"{name} cannot be acquired ({str(error).splitlines()[0]}): another process holds it, as hl-smi shows, "
            f"or it is not there; choose among devices {list(range(num_devices()))}, or end the other process"
        ) from error
    finally:
        if by_launcher is None:
            os.environ.pop(MODULE_ID, None)  # processes that this one starts have devices of their own


def _check_gradients() -> None:
    """Raise DeviceError unless autograd has a thread for the device; it makes all in its first backward pass."""
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones(1, device="hpu", requires_grad=True)
        try:
            value.sum().backward()
        except RuntimeError as error:
            advice = (
                "a backward pass ran in the process that this one was forked from; choose another start_method, such "
                "as 'popen', or train in forked processes alone"
                if "fork" in str(error)
                else "a backward pass ran before habana_frameworks was loaded; import habana_frameworks.torch where "
                "the script begins"
            )
            raise DeviceError(
                f"gradients cannot be computed on Gaudi in this process ({str(error).splitlines()[0]}): {advice}"
            ) from error
    mark_step()
