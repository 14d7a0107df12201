"""Prerequisites for compiling the extensions that offloading uses."""

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
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_logger = logging.getLogger(__name__)
_ASYNC_IO, _PIN_MEMORY = "async_io", "pin_memory"
_EXTENSIONS_DIR = "TORCH_EXTENSIONS_DIR"


def check_prerequisites(operation: str, option: str, environ: Mapping[str, str], *, is_for_gpus: bool = False) -> None:
    """Check that DeepSpeed has compiled an operation, or can.

    Args:
        operation: Its name, ``"cpu_adam"``, ``"fused_adam"`` or ``"async_io"``.
        option: What the user asked for that needs it, for error messages.
        environ: Says where programs are, and compiled operations.
        is_for_gpus: Whether it is written in CUDA.

    Raises:
        RequestError: Something is missing; the message says what, and how to get it.
    """
    if _was_installed(operation):
        return
    for part in _parts(operation):
        lock = build_folder(part, environ) / "lock"
        if _is_left_over(lock):
            raise RequestError(
                f"{option} needs DeepSpeed's {part}, and a process that ended while it compiled it has left a lock, "
                f"for which DeepSpeed would wait forever: rm {lock}"
            )
    lacking = _lacking(operation, environ)
    if is_for_gpus and not _has_nvcc(environ):
        lacking.append("there is no nvcc: install the CUDA toolkit, and name its folder in CUDA_HOME")
    if lacking:
        raise RequestError(f"{option} needs DeepSpeed's {operation}, to be compiled once, and {'; '.join(lacking)}")
    if not is_compiled(operation, environ):
        folder = build_folder(operation, environ)
        _logger.info("%s needs DeepSpeed's %s, which is compiled into %s, for some minutes", option, operation, folder)


def is_compiled(operation: str, environ: Mapping[str, str]) -> bool:
    """Return whether an operation has been compiled before, for this Python, and can be loaded at once."""
    folders = [build_folder(part, environ) for part in _parts(operation)]
    is_built = all((folder / f"{folder.name}.so").exists() and not _is_left_over(folder / "lock") for folder in folders)
    return is_built or _was_installed(operation)


def _parts(operation: str) -> tuple[str, ...]:
    """Return what DeepSpeed compiles for an operation, in its order."""
    return (_PIN_MEMORY, operation) if operation == _ASYNC_IO else (operation,)


def build_folder(operation: str, environ: Mapping[str, str]) -> Path:
    """Return the folder that torch compiles an operation in."""
    import torch

    if environ.get(_EXTENSIONS_DIR):
        return Path(environ[_EXTENSIONS_DIR]) / operation
    version = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    hardware = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".cache")
    return cache / "torch_extensions" / f"{version}_{hardware}" / operation


def programs_path(environ: Mapping[str, str]) -> str:
    """Return the search path with the programs of this Python's environment, such as its ninja, at its end."""
    return os.pathsep.join([environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])


def _was_installed(operation: str) -> bool:
    """Return whether the operation was compiled when DeepSpeed was installed (``DS_BUILD_CPU_ADAM=1``)."""
    found = importlib.util.find_spec("deepspeed")
    if found is None or found.origin is None:
        return False
    record = Path(found.origin).with_name("git_version_info_installed.py")
    return bool(record.exists() and runpy.run_path(str(record)).get("installed_ops", {}).get(operation))


def _is_left_over(lock: Path) -> bool:
    return lock.exists() and not _is_open_somewhere(lock)


def _is_open_somewhere(path: Path) -> bool:
    """Return whether a process has the file open, as the one that compiles does; True where nobody can tell."""
    processes = Path("/proc")
    if not (processes / "self" / "fd").exists():
        return True
    wanted = str(path.resolve())
    for folder in processes.glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if any(_target(link) == wanted for link in folder.iterdir()):
                return True
    return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _lacking(operation: str, environ: Mapping[str, str]) -> list[str]:
    """Return what is missing, each with how to get it."""
    path = programs_path(environ)
    lacking = []
    compiler = environ.get("CXX", "g++")
    if shutil.which(compiler, path=path) is None:
        lacking.append(f"there is no C++ compiler {compiler!r}: apt install g++, or name another one in CXX")
    if shutil.which("ninja", path=path) is None:
        lacking.append("there is no ninja: pip install ninja")
    if operation == _ASYNC_IO and not _has_libaio(environ):
        lacking.append("there is no libaio: apt install libaio-dev, or name its folders in CPATH and LIBRARY_PATH")
    return lacking


def _has_nvcc(environ: Mapping[str, str]) -> bool:
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    folders = [named] if named else ["/usr/local/cuda"]
    on_path = None if named else shutil.which("nvcc", path=programs_path(environ))
    return on_path is not None or any((Path(folder) / "bin" / "nvcc").exists() for folder in folders)


def _has_libaio(environ: Mapping[str, str]) -> bool:
    headers = [
        Path(folder) / "libaio.h" for folder in ("/usr/include", "/usr/local/include", *_folders(environ, "CPATH"))
    ]
    libraries = [Path(folder) / "libaio.so" for folder in _folders(environ, "LIBRARY_PATH")]
    has_library = ctypes.util.find_library("aio") is not None or any(library.exists() for library in libraries)
    return has_library and any(header.exists() for header in headers)


def _folders(environ: Mapping[str, str], variable: str) -> list[str]:
    return [folder for folder in environ.get(variable, "").split(os.pathsep) if folder]


def check_lockable(size: int, option: str, cure: str) -> None:
    """Check that this process may lock memory, which DeepSpeed ends with an abort where it may not.

    Args:
        size: Bytes.
        option: What the user asked for that needs it, for error messages.
        cure: How to need less.

    Raises:
        RequestError: It may lock less.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and size > limit and not _may_lock_any():
        raise RequestError(
            f"{option} locks {size / 2**20:,.0f} MiB of memory in each rank, and {limit / 2**20:,.0f} MiB are allowed: "
            f"raise the limit (ulimit -l, or memlock in /etc/security/limits.conf), or {cure}"
        )


def _may_lock_any() -> bool:
    """Return whether the process has Linux's capability CAP_IPC_LOCK."""
    with contextlib.suppress(OSError):
        # It begins with the name of the program, which may have any bytes.
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> 14 & 1)
    return False
