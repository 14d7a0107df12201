"""Horovod for the tests: built once for each torch, its wheel kept from run to run, and installed here.

Run as a program it builds what is not there yet.  If that is impossible, it prints the reason, and tests are skipped
with it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

VERSION = "0.28.1"
FOLDER_VARIABLE = "DSTRAT_TEST_EXTENSIONS"
_WITHOUT = {f"HOROVOD_WITHOUT_{name}": "1" for name in ("TENSORFLOW", "MXNET", "MPI")}
_WITH = {f"HOROVOD_WITH_{name}": "1" for name in ("PYTORCH", "GLOO")}
# Horovod asks for C++14, which the headers of today's torch are not; the last option counts.
_COMPILER = '#!/bin/sh\nexec {compiler} "$@" -std=c++17\n'


def folder() -> Path:
    """Return where the wheel is, by everything that decides whether it can be loaded here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dstrat" / "horovod"
    build = hashlib.sha256(f"{torch.version.git_version} {torch.version.cuda}".encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    name = f"horovod-{VERSION}-torch-{torch.__version__}-{python}-{sys.platform}-{platform.machine()}-{build}"
    return Path(os.environ.get(FOLDER_VARIABLE) or cache) / name


def why_missing() -> str:
    """Return why Horovod is not installed here; empty where it is."""
    try:
        importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        reason = folder() / "reason.txt"
        if reason.exists():
            return f"Horovod could not be built here: {reason.read_text(encoding='utf-8')}"
        return "Horovod is not installed here: python3 noxfile.py -s third_party"
    return ""


def install() -> None:
    """Install Horovod, from the wheel that is there, or from a new one."""
    if not why_missing():
        return
    if not wheel():
        _build()
    if wheel():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *map(str, wheel())], check=True)
    else:
        print(why_missing(), flush=True)


def wheel() -> list[Path]:
    """Return the wheel, if it is there."""
    return sorted(folder().glob("horovod-*.whl"))


def _build() -> None:
    folder().mkdir(parents=True, exist_ok=True)
    print("building Horovod for some minutes", flush=True)
    begun = time.monotonic()
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-v"]
    with tempfile.TemporaryDirectory() as temporary:
        log, building = folder() / "build.log", Path(temporary)
        with log.open("wb") as output:
            code = subprocess.run(
                [*command, f"--wheel-dir={building}", f"horovod=={VERSION}"],
                env=_build_environment(building),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        for built in building.glob("*.whl"):
            # Under its name only when it is complete, as another run of the tests may look for it.
            shutil.copyfile(built, folder() / f"{built.name}.unfinished")
            (folder() / f"{built.name}.unfinished").replace(folder() / built.name)
    if code == 0:
        (folder() / "reason.txt").unlink(missing_ok=True)
        print(f"built Horovod in {time.monotonic() - begun:.0f} s: {folder()}", flush=True)
    else:
        (folder() / "reason.txt").write_text(f"{_first_error(log)} (see {log})", encoding="utf-8")


def _build_environment(building: Path) -> dict[str, str]:
    compiler = building / "c++"
    compiler.write_text(_COMPILER.format(compiler=os.environ.get("CXX") or shutil.which("g++") or "c++"))
    compiler.chmod(0o755)
    makes = {"MAKEFLAGS": f"-j{os.cpu_count() or 1}", "CMAKE_POLICY_VERSION_MINIMUM": "3.5", "CXX": str(compiler)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **_WITH, **_WITHOUT, **makes, "PATH": path}


def _first_error(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = (line.strip() for line in lines if "error:" in line.lower() or "not found" in line.lower())
    return next(errors, lines[-1].strip() if lines else "pip wheel printed nothing")


if __name__ == "__main__":
    install()
