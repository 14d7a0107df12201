"""Running a program as a job of processes: how long it took, how much memory it had, what it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
MARK = "DSTRAT_BENCHMARK_JOB"
"""Set in the environment of a job, so that all of its processes can be found, orphans too."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """What a job did.

    Attributes:
        seconds: From its start until nothing of it was left.
        ended_at: When that was, in seconds since the epoch.
        returncode: Of the first process.
        output: Its standard output and error.
        peak_memory: Largest sum of the resident sizes of its processes, in bytes; 0 where it was not watched.
        leftovers: Whether processes were left when the first one had ended and had to be killed.
    """

    seconds: float
    ended_at: float
    returncode: int
    output: str
    peak_memory: int
    leftovers: bool


class JobFailedError(RuntimeError):
    """A job that should have worked did not."""


def run_job(
    command: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    watch_memory: bool = False,
    patience: float = 120.0,
    must_work: bool = True,
) -> JobResult:
    """Run a program until it has ended and all of its processes are gone.

    Args:
        command: The program.
        environ: Added to this process's environment.
        watch_memory: Whether to sum up the memory of its processes, 20 times in a second.
        patience: Seconds after which everything that is left is killed.
        must_work: Whether a failure is an error here.

    Raises:
        JobFailedError: It had to work and did not.
    """
    mark = uuid.uuid4().hex
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {}), MARK: mark}
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(
        [str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if watch_memory:
        while process.poll() is None and time.perf_counter() - started < patience:
            peak = max(peak, sum(resident_size(pid) for pid in processes_of(mark)))
            time.sleep(0.05)
    output, late = _finish(process, mark, patience=max(1.0, patience - (time.perf_counter() - started)))
    seconds, ended_at = time.perf_counter() - started, time.time()
    if must_work and (process.returncode != 0 or late):
        raise JobFailedError(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{output[-4000:]}")
    return JobResult(
        seconds=seconds,
        ended_at=ended_at,
        returncode=process.returncode,
        output=output,
        peak_memory=peak,
        leftovers=late,
    )


def _finish(process: subprocess.Popen[str], mark: str, *, patience: float) -> tuple[str, bool]:
    """Wait for the process and all others of the job; kill what is left, and return whether there was something."""
    deadline = time.perf_counter() + patience
    try:
        # Reads until the last process that holds the pipe has ended.
        output, _ = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        _kill(mark)
        output, _ = process.communicate()
        return output, True
    while processes_of(mark) and time.perf_counter() < deadline:
        time.sleep(0.02)
    return output, _kill(mark)


def _kill(mark: str) -> bool:
    left = processes_of(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def processes_of(mark: str) -> list[int]:
    """Return the processes that have the mark in their environment and still run."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environ = Path(entry.path, "environ").read_bytes()  # empty for a process that has ended
            except OSError:
                continue
            if wanted in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


def resident_size(pid: int) -> int:
    """Return the bytes of memory that a process has; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


def torchrun(processes: int, program: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that starts a program of this folder by torchrun."""
    run = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*run, str(HERE / program), *arguments]


def script(program: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that starts a program of this folder."""
    return [python, str(HERE / program), *arguments]
