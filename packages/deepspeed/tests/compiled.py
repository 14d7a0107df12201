"""What DeepSpeed compiles for offloading, kept from run to run in a folder of this torch and this processor.

Run as a program it compiles what is not there yet.  Tests take it from there without asking a compiler, which would
compile it anew for each new environment.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrat.errors import RequestError
from dstrat_deepspeed.runtime import check_lockable, check_prerequisites

FOLDER_VARIABLE = "DSTRAT_TEST_EXTENSIONS"
PARTS = {"cpu_adam": ("cpu_adam",), "async_io": ("pin_memory", "async_io")}
LOCKED = {"async_io": 32 * 2**20}  # bytes; a rank of the tests that use it had 17 MiB at most
_BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}


def folder() -> Path:
    """Return where they are kept, by everything that decides whether they can be loaded here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstrat" / "deepspeed-extensions"
    found = hashlib.sha256(f"{torch.version.git_version} {torch.version.cuda} {_processor()}".encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"deepspeed-{version('deepspeed')}-torch-{torch.__version__}-{python}-{found}"
    return Path(os.environ.get(FOLDER_VARIABLE) or cache) / name


def _processor() -> str:
    """Return what the compiler's ``-march=native`` stands for."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text(encoding="utf-8").splitlines() if described.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def needs_compiled(*operations: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that run where operations have been compiled before."""
    reason = next(filter(None, map(why_not, operations)), None)
    return [pytest.mark.builds, pytest.mark.skipif(reason is not None, reason=str(reason))]


def why_not(operation: str) -> str | None:
    """Return why an operation cannot be used here, and what to do; None where it can."""
    reason = _why_not_loaded(operation)
    if reason is None and operation in LOCKED:
        try:
            check_lockable(LOCKED[operation], "the test", "run the tests that need it elsewhere")
        except RequestError as error:
            return str(error)
    return reason


def _why_not_loaded(operation: str) -> str | None:
    if not all(_is_whole(part) for part in PARTS[operation]):
        return f"{operation} is not compiled in {folder()}: python3 noxfile.py -s builds (some minutes, once)"
    try:
        check_prerequisites(operation, "the test", _environ())
    except RequestError as error:
        return str(error)
    return None


def use_compiled(*operations: str) -> None:
    """Let DeepSpeed have operations in this process, as if it had loaded them before."""
    os.environ.update(_environ())
    loaded: Any = import_module("deepspeed.ops.op_builder.builder").OpBuilder._loaded_ops
    for part in (part for operation in operations for part in PARTS[operation]):
        spec: Any = importlib.util.spec_from_file_location(part, _library(part))
        loaded[part] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[part])
        ctypes.CDLL(str(_library(part)), mode=ctypes.RTLD_GLOBAL)  # async_io uses symbols of pin_memory


def _environ() -> dict[str, str]:
    """Return an environment in which locks and builds of other programs are not seen."""
    return {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder() / "none")}


def _library(part: str) -> Path:
    return folder() / f"{part}.so"


def _sum(part: str) -> Path:
    return folder() / f"{part}.sha256"


def _is_whole(part: str) -> bool:
    if not (_library(part).exists() and _sum(part).exists()):
        return False
    return _sum(part).read_text(encoding="utf-8") == hashlib.sha256(_library(part).read_bytes()).hexdigest()


def compile_missing() -> None:
    """Compile what is not there yet, or is damaged."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for operation, parts in PARTS.items():
        if _why_not_loaded(operation) is None:
            print(operation, "is there:", folder(), flush=True)
        else:
            _compile(operation, parts)


def _compile(operation: str, parts: tuple[str, ...]) -> None:
    building = folder() / "building"
    shutil.rmtree(building, ignore_errors=True)  # a build that was killed leaves a lock, for which others wait
    building.mkdir(parents=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(building)
    check_prerequisites(operation, "the tests", os.environ)
    print("compiling", operation, "for some minutes", flush=True)
    begun = time.monotonic()
    getattr(import_module("deepspeed.ops.op_builder"), _BUILDERS[operation])().load(verbose=False)
    for part in parts:
        _sum(part).unlink(missing_ok=True)
        shutil.copyfile(building / part / f"{part}.so", _library(part))
        _sum(part).write_text(hashlib.sha256(_library(part).read_bytes()).hexdigest(), encoding="utf-8")
    shutil.rmtree(building)
    print(f"compiled {operation} in {time.monotonic() - begun:.0f} s: {folder()}", flush=True)


if __name__ == "__main__":
    compile_missing()
