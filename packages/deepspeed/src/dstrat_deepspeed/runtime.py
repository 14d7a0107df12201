"""DeepSpeed as a library: its import, messages and warnings, environment and compiled extensions."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.util
import logging
import os
import resource
import runpy
import shutil
import sys
import sysconfig
import warnings
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed import internals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager
    from datetime import timedelta

_logger = logging.getLogger(__name__)
_ACCELERATOR_VARIABLE = "DS_ACCELERATOR"
_IGNORED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # torch 2.13 has other names for the collectives
    (r".torch\.distributed\.\w+. is deprecated", FutureWarning),
    # DeepSpeed imports modules of torch that raise these themselves; from torch 2.15 on the second one
    (r".torch\.jit\.\w+. is deprecated", DeprecationWarning),
    (r".torch\.jit\.\w+. is deprecated", FutureWarning),
    # stage 0 makes sparse gradients of their averaged parts
    (r"Sparse invariant checks are implicitly disabled", UserWarning),
)
_IGNORED_MESSAGES = (
    "ZeRO with an untested optimizer",  # zero_allow_untested_optimizer allows it
    "OVERFLOW! Skipping step. Gradients are non-finite",  # the strategy logs "step skipped"
)


def load_deepspeed(device_type: str, logging_level: int) -> Any:
    """Import DeepSpeed for a device type, such as ``"cpu"`` or ``"cuda"``, and set the level of its messages.

    Raises:
        ConflictError: DeepSpeed has been imported for other hardware, or the environment requests it.
    """
    requested = os.environ.get(_ACCELERATOR_VARIABLE)
    if requested not in (None, device_type):
        raise ConflictError(
            f"{_ACCELERATOR_VARIABLE} is {requested!r}, and the accelerator computes on {device_type!r}: leave it unset"
        )
    with environment({_ACCELERATOR_VARIABLE: device_type}), quiet_warnings():
        deepspeed = import_module("deepspeed")
        loaded = import_module("deepspeed.accelerator").get_accelerator().device_name()
        internals.compile_muon_late()
    if loaded != device_type:
        raise ConflictError(
            f"DeepSpeed was imported for {loaded!r} before, and the accelerator computes on {device_type!r}: "
            f"set {_ACCELERATOR_VARIABLE}={device_type} before the program starts"
        )
    logger = logging.getLogger("DeepSpeed")
    for handler in list(logger.handlers):  # they write to stdout, into the output of the user's program
        logger.removeHandler(handler)
    logger.propagate = True
    logger.addFilter(_is_worth_logging)
    logger.setLevel(logging_level)
    return deepspeed


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return whether a message says more than the user's options and the strategy's own messages."""
    return not any(text in str(record.msg) for text in _IGNORED_MESSAGES)


def log_level(value: Any) -> int:
    """Return the number of a logging level, from a number or a name such as ``"info"``."""
    level = logging.getLevelName(value.upper()) if isinstance(value, str) else value
    if isinstance(level, bool) or not isinstance(level, int):
        raise RequestError(
            f"logging_level {value!r} is not possible: give 'debug', 'info', 'warning', 'error' or a number of logging"
        )
    return level


@contextmanager
def running(
    deepspeed: Any, *, local_rank: int, device_rank: int, local_size: int, timeout: timedelta
) -> Iterator[None]:
    """Make DeepSpeed use the open process group in a ``with`` block.

    DeepSpeed has one group for a process, and blocks of several strategies may end in any order, also when a strategy
    is freed.  The last one ends the settings.

    Args:
        deepspeed: The library.
        local_rank: Index of this process on its machine.
        device_rank: Index of its device, of ``devices=[2, 3]`` 2 or 3.
        local_size: Number of processes on the machine.
        timeout: How long a collective waits.
    """
    if local_rank == 0:  # before the ranks of this job compile what DeepSpeed communicates with on CPUs
        warns_of_lock(build_folder(_COMMUNICATION, os.environ))
    # DeepSpeed reads the local rank from the environment.  Without LOCAL_SIZE it runs the program numactl on CPUs, in
    # each step of stage 3.
    variables = {"LOCAL_RANK": str(local_rank), "LOCAL_SIZE": str(local_size)}
    on_device = partial(environment, {"LOCAL_RANK": str(device_rank)})
    run = object()
    _shared.begin(run)
    try:
        internals.number_parameters_from_zero()
        if not _shared.is_set:
            bound = internals.bound_process_group(deepspeed, timeout)
            _shared.set(environment(variables), quiet_warnings(), bound, internals.checks_on_device(on_device))
        yield
    finally:
        _shared.end(run)


class _SharedSettings:
    """Settings of this process for the runs in one process group, of which there may be several."""

    def __init__(self) -> None:
        self._runs: list[object] = []
        self._group: Any = None
        self._settings = ExitStack()
        self.is_set = False

    def begin(self, run: object) -> None:
        """Add a run; settings of an earlier process group, which has been closed, end first."""
        if self._group is not dist.group.WORLD:
            self._close()
            self._group = dist.group.WORLD
        self._runs.append(run)

    def set(self, *contexts: AbstractContextManager[Any]) -> None:
        """Enter the contexts of the settings."""
        self.is_set = True
        for context in contexts:
            self._settings.enter_context(context)

    def end(self, run: object) -> None:
        """Remove a run, and end the settings with the last one."""
        if any(run is one for one in self._runs):
            self._runs = [one for one in self._runs if one is not run]
            if not self._runs:
                self._close()

    def _close(self) -> None:
        self._runs, self._group, self.is_set = [], None, False
        self._settings.close()


_shared = _SharedSettings()


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
    """Ignore warnings about DeepSpeed's own use of torch in a ``with`` block."""
    before = list(warnings.filters)
    for message, category in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    added = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        # Not catch_warnings(), which would also reset the filters that the training sets meanwhile.
        for entry in added:
            if entry in warnings.filters:
                cast("list[Any]", warnings.filters).remove(entry)


# Extensions that DeepSpeed compiles on first use

_ASYNC_IO, _PIN_MEMORY, _COMMUNICATION = "async_io", "pin_memory", "deepspeed_shm_comm"
_EXTENSIONS_DIR = "TORCH_EXTENSIONS_DIR"
_CAP_IPC_LOCK = 14  # Linux's number of the capability to lock any amount of memory


def check_prerequisites(operation: str, option: str, environ: Mapping[str, str], *, is_for_gpus: bool = False) -> None:
    """Raise a RequestError if DeepSpeed has not compiled an operation, and cannot compile it.

    Args:
        operation: Name of the operation: ``"cpu_adam"``, ``"fused_adam"``, ``"async_io"`` ...
        option: The user's option that needs it, for messages.
        environ: The environment, for the paths of programs and of compiled operations.
        is_for_gpus: Whether it is written in CUDA.
    """
    if _was_installed(operation):
        return
    missing = _missing_tools(operation, environ, is_for_gpus=is_for_gpus)
    if missing:
        raise RequestError(f"{option} needs DeepSpeed's {operation}, to be compiled once, and {'; '.join(missing)}")
    # The tools are needed in either case: torch runs ninja on a compiled operation too, to see whether it is current.
    for name in (_PIN_MEMORY, operation) if operation == _ASYNC_IO else (operation,):
        folder = build_folder(name, environ)
        if not warns_of_lock(folder) and not (folder / f"{name}.so").exists():
            _logger.info("%s needs DeepSpeed's %s, which is compiled into %s, for some minutes", option, name, folder)


def warns_of_lock(folder: Path) -> bool:
    """Return whether a folder is locked for compiling by no process of this machine, and warn of it."""
    lock = folder / "lock"
    if not lock.exists() or _is_open(lock):
        return False
    # torch waits for it silently, and forever if the process that made it was killed.
    _logger.warning("%s exists: a process is compiling, or was killed; if none is, rm %s", lock, lock)
    return True


def _is_open(path: Path) -> bool:
    """Return whether a process has a file open, as torch has a lock that it made; False where that cannot be seen."""
    path = path.resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(descriptor.readlink() == path for descriptor in (process / "fd").iterdir()):
                return True
    return False


def build_folder(operation: str, environ: Mapping[str, str]) -> Path:
    """Return the folder in which torch compiles an operation."""
    # As in torch.utils.cpp_extension, which has no public function for it.
    if environ.get(_EXTENSIONS_DIR):
        return Path(environ[_EXTENSIONS_DIR]) / operation
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    hardware = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return cache / "torch_extensions" / f"{version}_{hardware}" / operation


def programs_path(environ: Mapping[str, str]) -> str:
    """Return the search path with the scripts of this Python's environment, such as ninja, at its end."""
    return os.pathsep.join([environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _was_installed(operation: str) -> bool:
    """Return whether an operation was compiled at the installation of DeepSpeed (``DS_BUILD_CPU_ADAM=1``)."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    record = Path(spec.origin).with_name("git_version_info_installed.py")
    return bool(record.exists() and runpy.run_path(str(record)).get("installed_ops", {}).get(operation))


def _missing_tools(operation: str, environ: Mapping[str, str], *, is_for_gpus: bool) -> list[str]:
    """Return the tools that a build lacks, each with the command that installs it."""
    path = programs_path(environ)
    compiler = environ.get("CXX", "g++")
    missing = []
    if shutil.which(compiler, path=path) is None:
        missing.append(f"there is no C++ compiler {compiler!r}: apt install g++, or name another one in CXX")
    if shutil.which("ninja", path=path) is None:
        missing.append("there is no ninja: pip install ninja")
    if operation == _ASYNC_IO and not _has_libaio(environ):
        missing.append("there is no libaio: apt install libaio-dev, or name its folders in CPATH and LIBRARY_PATH")
    if is_for_gpus and not _has_nvcc(environ):
        missing.append("there is no nvcc: install the CUDA toolkit, and name its folder in CUDA_HOME")
    return missing


def _has_nvcc(environ: Mapping[str, str]) -> bool:
    toolkit = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if toolkit is None and shutil.which("nvcc", path=programs_path(environ)) is not None:
        return True
    return (Path(toolkit or "/usr/local/cuda") / "bin" / "nvcc").exists()


def _has_libaio(environ: Mapping[str, str]) -> bool:
    headers = ["/usr/include", "/usr/local/include", *environ.get("CPATH", "").split(os.pathsep)]
    libraries = filter(None, environ.get("LIBRARY_PATH", "").split(os.pathsep))
    has_library = ctypes.util.find_library("aio") or any(Path(folder, "libaio.so").exists() for folder in libraries)
    return bool(has_library) and any(Path(folder, "libaio.h").exists() for folder in filter(None, headers))


def check_lockable(size: int, option: str, hint: str) -> None:
    """Raise a RequestError, with the option and a hint, if this process may not lock an amount of memory in bytes."""
    # DeepSpeed aborts the process at the limit, without a Python exception.
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and size > limit and not _may_lock_any():
        raise RequestError(
            f"{option} locks {size / 2**20:,.0f} MiB of memory in each rank, and {limit / 2**20:,.0f} MiB are allowed: "
            f"raise the limit (ulimit -l, or memlock in /etc/security/limits.conf), or {hint}"
        )


def _may_lock_any() -> bool:
    with contextlib.suppress(OSError):
        # errors="replace": the file has the name of the program, which may contain any bytes.
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False
