"""Compilation of the simulated GPU's C++ part, kept for each torch."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "_simulated_gpu"
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")
FOLDER = "DSTRAT_TEST_EXTENSIONS"
"""Environment variable: the folder of compiled parts; without it they are in ``~/.cache/dstrat``."""


def load() -> Any:
    """Return the compiled module; a C++ compiler (``c++``, or ``CXX``) makes it when it is missing."""
    spec = importlib.util.spec_from_file_location(_NAME, _compile_missing())
    assert spec is not None  # noqa: S101 - the path has the suffix of an extension
    assert spec.loader is not None  # noqa: S101 - likewise
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the path of the compiled part, named by all that decides whether it can be loaded here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstrat"
    versions = [torch.__version__, str(torch.version.git_version), sys.version, os.uname().machine, *_FLAGS]
    key = hashlib.sha256("\n".join([*versions, _SOURCE.read_text(encoding="utf-8")]).encode()).hexdigest()[:16]
    return Path(os.environ.get(FOLDER) or cache) / "simulated-gpu" / f"torch-{torch.__version__}-{key}" / f"{_NAME}.so"


def _compile_missing() -> Path:
    """Compile the library unless it is there; processes that want it at the same time wait."""
    path = library()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print("compiling the simulated GPU, about a minute", file=sys.stderr, flush=True)
            began = time.monotonic()
            unfinished = path.with_suffix(".unfinished")
            subprocess.run(_command(unfinished), check=True)  # noqa: S603 - our own source
            unfinished.rename(path)
            print(f"compiled in {time.monotonic() - began:.0f} s: {path}", file=sys.stderr, flush=True)
    return path


def _command(target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        os.environ.get("CXX", "c++"),
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={_NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",  # noqa: SLF001 - torch's own builder reads it
        *(f"-isystem{folder}" for folder in includes),
        str(_SOURCE),
        "-o",
        str(target),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")),
    ]


if __name__ == "__main__":
    print(_compile_missing())
