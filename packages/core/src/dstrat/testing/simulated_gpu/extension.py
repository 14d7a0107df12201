"""Compilation of a simulated device's C++ part, kept for each torch.

``python -m dstrat.testing.simulated_gpu.extension [SOURCE]`` compiles it ahead of tests that run side by side.
"""

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

HEADERS = Path(__file__).parent
"""Folder of the C++ headers that simulated devices share: ``simulated_device.h`` and ``simulated_collectives.h``."""
SIMULATED_GPU = HEADERS / "simulated_gpu.cpp"
_FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")
FOLDER = "DSTRAT_TEST_EXTENSIONS"
"""Environment variable: the folder of compiled parts; without it they are in ``~/.cache/dstrat``."""


def load(source: Path = SIMULATED_GPU) -> Any:
    """Return the module of a C++ source; a compiler (``c++``, or ``CXX``) makes it when it is missing."""
    spec = importlib.util.spec_from_file_location(source.stem, compile_missing(source))
    assert spec is not None  # noqa: S101 - the path has the suffix of an extension
    assert spec.loader is not None  # noqa: S101 - likewise
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(source: Path = SIMULATED_GPU) -> Path:
    """Return the path of the compiled module, named by all that decides whether it can be loaded here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstrat"
    versions = [torch.__version__, str(torch.version.git_version), sys.version, os.uname().machine, *_FLAGS]
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(HEADERS.glob("*.h")))]
    key = hashlib.sha256("\n".join([*versions, *texts]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get(FOLDER) or cache) / "simulated-devices" / f"torch-{torch.__version__}-{key}"
    return folder / f"{source.stem}.so"


def compile_missing(source: Path = SIMULATED_GPU) -> Path:
    """Compile a source unless that was done before; processes that want it at the same time wait.  Return the path."""
    path = library(source)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print(f"compiling {source.name}, about a minute", file=sys.stderr, flush=True)
            began = time.monotonic()
            unfinished = path.with_suffix(".unfinished")
            subprocess.run(_command(source, unfinished), check=True)  # noqa: S603 - our own source
            unfinished.rename(path)
            print(f"compiled in {time.monotonic() - began:.0f} s: {path}", file=sys.stderr, flush=True)
    return path


def _command(source: Path, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        os.environ.get("CXX", "c++"),
        *_FLAGS,
        f"-DTORCH_EXTENSION_NAME={source.stem}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",  # noqa: SLF001 - torch's own builder reads it
        f"-I{HEADERS}",
        *(f"-isystem{folder}" for folder in includes),
        str(source),
        "-o",
        str(target),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")),
    ]


if __name__ == "__main__":
    print(compile_missing(*map(Path, sys.argv[1:])))
