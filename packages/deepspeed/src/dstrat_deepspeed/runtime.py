"""DeepSpeed as a library: imported for the right hardware, quiet, and bound to the process group that is open."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import ModuleType

_ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
_SHM_COMM = "deepspeed_shm_comm"


def load_deepspeed(device_type: str, logging_level: int) -> Any:
    """Import DeepSpeed for a type of hardware, and let its log follow ours.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        logging_level: The least level of its messages.

    Raises:
        ConflictError: It has been imported, or asked for in the environment, for other hardware.
    """
    asked = os.environ.get(_ACCELERATOR_VARIABLE)
    if asked not in (None, device_type):
        raise ConflictError(
            f"{_ACCELERATOR_VARIABLE} is {asked!r}, and the accelerator computes on {device_type!r}: leave it unset"
        )
    with environment({_ACCELERATOR_VARIABLE: device_type}), quiet_warnings():
        deepspeed = import_module("deepspeed")
        found = import_module("deepspeed.accelerator").get_accelerator().device_name()
    if found != device_type:
        raise ConflictError(
            f"DeepSpeed was imported for {found!r} before, and the accelerator computes on {device_type!r}: "
            f"set {_ACCELERATOR_VARIABLE}={device_type} before the program starts"
        )
    _follow_our_log(logging_level)
    return deepspeed


def _follow_our_log(level: int) -> None:
    """Let DeepSpeed's logger pass its messages on, rather than write them on stdout."""
    logger = logging.getLogger("DeepSpeed")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(level)


def join_process_group(deepspeed: Any) -> None:
    """Let DeepSpeed communicate through the process group that is open."""
    # Its shared-memory communication, which it would compile, is for inference.
    compatible = {_SHM_COMM: False}
    module = vars(deepspeed.ops)
    before = module.get("__compatible_ops__")
    module["__compatible_ops__"] = {**(before or {}), **compatible}
    try:
        deepspeed.comm.init_distributed(
            deepspeed.accelerator.get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            dist_init_required=False,
            verbose=False,
        )
    finally:
        if before is None:
            del module["__compatible_ops__"]
        else:
            module["__compatible_ops__"] = before


def leave_process_group() -> None:
    """Let DeepSpeed forget the process group and those that it has made of it; nothing is closed."""
    comm: Any = _imported("deepspeed.comm.comm")
    if comm is None:
        return
    import_module("deepspeed.utils.groups")._release_process_group_references()  # noqa: SLF001 - it is called only where the group is closed too
    comm.cdb = None


def _imported(name: str) -> ModuleType | None:
    return sys.modules.get(name)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in a ``with`` block, which DeepSpeed reads there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Silence in a ``with`` block what DeepSpeed does with newer versions of torch, and users cannot change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*|deepspeed.*")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield
