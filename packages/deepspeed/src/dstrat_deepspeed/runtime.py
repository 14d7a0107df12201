"""DeepSpeed as a library: imported for the right hardware, quiet, bound to the open process group."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dstrat.errors import ConflictError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta


_ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
_COMPATIBLE = "__compatible_ops__"
_NOT_OURS: tuple[tuple[str, type[Warning]], ...] = (
    # torch 2.13 has other names for the collectives
    (r".torch\.distributed\.\w+. is deprecated", FutureWarning),
    # DeepSpeed imports parts of torch that raise these themselves; from torch 2.15 on the second one
    (r".torch\.jit\.\w+. is deprecated", DeprecationWarning),
    (r".torch\.jit\.\w+. is deprecated", FutureWarning),
    # stage 0 makes sparse gradients of their averaged parts
    (r"Sparse invariant checks are implicitly disabled", UserWarning),
)
_SAID_ALREADY = (
    "ZeRO with an untested optimizer",  # zero_allow_untested_optimizer allows it
    "OVERFLOW! Skipping step. Gradients are non-finite",  # the strategy logs "step skipped"
)


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
        compile_muon_late()
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
    logger.addFilter(_is_news)
    logger.setLevel(level)


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a message says what the user has not chosen, and what no line of ours says."""
    return not any(part in str(record.msg) for part in _SAID_ALREADY)


def log_level(given: Any) -> int:
    """Return a level of logging from its number or its name, such as ``"info"``.

    Raises:
        RequestError: There is no such level.
    """
    level = logging.getLevelName(given.upper()) if isinstance(given, str) else given
    if isinstance(level, bool) or not isinstance(level, int):
        raise RequestError(
            f"logging_level {given!r} is not possible: give 'debug', 'info', 'warning', 'error' or a number of logging"
        )
    return level


@contextmanager
def running(deepspeed: Any, *, local_rank: int, local_size: int, timeout: timedelta) -> Iterator[None]:
    """Let DeepSpeed communicate, in a ``with`` block, through the process group that is open.

    Args:
        deepspeed: The library.
        local_rank: Rank of this process on its machine, which DeepSpeed asks the environment for.
        local_size: Ranks on the machine; without it DeepSpeed runs ``numactl`` on CPUs in each step of stage 3.
        timeout: How long a collective waits for the other ranks, in groups that DeepSpeed makes too.
    """
    _count_parameters_anew()
    with environment({"LOCAL_RANK": str(local_rank), "LOCAL_SIZE": str(local_size)}), quiet_warnings():
        with _without_shared_memory(deepspeed):
            deepspeed.comm.init_distributed(
                deepspeed.accelerator.get_accelerator().communication_backend_name(),
                auto_mpi_discovery=False,
                dist_init_required=False,
                verbose=False,
            )
        comm: Any = import_module("deepspeed.comm.comm")
        comm.cdb.new_group = partial(dist.new_group, timeout=timeout)
        try:
            yield
        finally:
            _forget_process_group()


def _count_parameters_anew() -> None:
    """Reset what stage 3 counts of all runs of a process, which may differ between ranks after one that failed."""
    init: Any = import_module("deepspeed.runtime.zero.partition_parameters").Init
    init.param_id = init.num_persisted_parameters = init.num_persisted_elements = 0


@contextmanager
def _without_shared_memory(deepspeed: Any) -> Iterator[None]:
    """Keep DeepSpeed from compiling its communication through shared memory, which is for inference."""
    known = vars(deepspeed.ops)
    before = known.get(_COMPATIBLE)
    known[_COMPATIBLE] = {**(before or {}), "deepspeed_shm_comm": False}
    try:
        yield
    finally:
        if before is None:
            del known[_COMPATIBLE]  # found out by DeepSpeed, with compilers, when it is asked for
        else:
            known[_COMPATIBLE] = before


def _forget_process_group() -> None:
    """Let DeepSpeed forget the process group and those that it has made of it; nothing is closed."""
    import_module("deepspeed.utils.groups")._release_process_group_references()  # noqa: SLF001 - the public way closes the group too
    comm: Any = import_module("deepspeed.comm.comm")
    comm.cdb = None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables in a ``with`` block."""
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
    """Silence in a ``with`` block the warnings about how DeepSpeed uses torch, which its users cannot change."""
    before = list(warnings.filters)
    for message, category in _NOT_OURS:
        warnings.filterwarnings("ignore", message=message, category=category)
    added = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        for entry in added:
            if entry in warnings.filters:
                cast("list[Any]", warnings.filters).remove(entry)


# Keeping DeepSpeed from loading torch's compiler, which takes a second in each rank, before somebody needs it.


_MUON = "deepspeed.runtime.zero.muon.original_muon"


def compile_muon_late() -> None:
    """Import DeepSpeed's Muon so that its functions are compiled when they are called first.

    DeepSpeed imports it for every optimizer, to see whether it is one, and decorates them with ``torch.compile``.
    """
    compiler: Any = import_module("deepspeed.runtime.compiler")
    before = compiler.compile
    compiler.compile = lambda: _compiled_when_called
    try:
        import_module(_MUON)
    finally:
        compiler.compile = before


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of another one, which compiles it too
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return call


# DeepSpeed's own activation checkpointing, which has its settings in globals.


_GLOBALS = (
    "CONTIGUOUS_CHECKPOINTING",
    "CPU_CHECKPOINT",
    "PARTITION_ACTIVATIONS",
    "PROFILE_TIME",
    "SYNCHRONIZE",
    "deepspeed_checkpointing_enabled",
    "num_layers",
)


@contextmanager
def activation_checkpointing(deepspeed: Any, section: Mapping[str, Any]) -> Iterator[None]:
    """Let ``deepspeed.checkpointing.checkpoint`` follow a configuration in a ``with`` block.

    Args:
        deepspeed: The library.
        section: ``activation_checkpointing`` of a configuration.
    """
    checkpointing = deepspeed.checkpointing
    before = {name: getattr(checkpointing, name) for name in _GLOBALS}
    try:
        checkpointing.configure(
            None,
            partition_activations=section.get("partition_activations"),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
            checkpoint_in_cpu=section.get("cpu_checkpointing"),
            synchronize=section.get("synchronize_checkpoint_boundary"),
            profile=section.get("profile"),
        )
        yield
    finally:
        checkpointing.reset()
        vars(checkpointing).update(before)
