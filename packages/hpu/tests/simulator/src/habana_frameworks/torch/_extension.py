"""The compiled part of the simulator: compiled once for each torch, and kept outside of the clone.

``python -m habana_frameworks.torch._extension`` compiles it ahead of tests that run side by side.
"""

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("_simulator.cpp")
NAME = "_simulator"
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", "-w")


def library() -> Path:
    """Return where the compiled part is kept, by everything that decides whether it can be loaded here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstrat"
    folder = Path(os.environ.get("DSTRAT_TEST_EXTENSIONS") or cache) / "hpu-simulator"
    seen = [torch.__version__, str(torch.version.git_version), sys.version, os.uname().machine, *FLAGS]
    key = hashlib.sha256("\n".join([*seen, SOURCE.read_text(encoding="utf-8")]).encode()).hexdigest()[:16]
    return folder / f"torch-{torch.__version__}-{key}" / f"{NAME}.so"


def compile_missing() -> Path:
    """Compile the library unless it is there; others that want it at the same time wait."""
    path = library()
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            print("compiling the simulator of Gaudi, about a minute", file=sys.stderr, flush=True)
            begun = time.monotonic()
            unfinished = path.with_suffix(".unfinished")
            subprocess.run(_command(unfinished), check=True)
            unfinished.rename(path)
            print(f"compiled in {time.monotonic() - begun:.0f} s: {path}", file=sys.stderr, flush=True)
    return path


def _command(target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    return [
        os.environ.get("CXX", "c++"),
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{folder}" for folder in includes),
        str(SOURCE),
        "-o",
        str(target),
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")),
    ]


def load():
    """Return the compiled module."""
    spec = importlib.util.spec_from_file_location(NAME, compile_missing())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(compile_missing())
