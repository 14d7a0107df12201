"""Running a function in several processes that cost a fraction of a second, as copies of one that has loaded torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dstrat.testing.advice import fail
from dstrat.testing.rank import Report, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_SECONDS = 60.0
_PATIENCE = 8.0  # seconds for the others after one rank has failed
_STACKS = 0.5  # seconds for a rank to write its stack
_PARTING = 1.0  # seconds for ranks to end after they have reported
_preloaded = ["torch", "torch._dynamo", "torch.distributed", "dstrat.testing.rank", "dstrat.testing.fits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank of a job ended.

    Attributes:
        rank: Its rank.
        report: What it sent; None where it sent nothing.
        output: What it printed.
        stack: Where it was when its time was up; empty where it ended by itself.
        exit_code: Negative for a signal; None where it had to be ended.
    """

    rank: int
    report: Report | None
    output: str
    stack: str
    exit_code: int | None


def preload(module: str) -> None:
    """Let the process that ranks are copies of load a module too; of no effect once there is one."""
    if module not in _preloaded:
        _preloaded.append(module)


def run_job(
    function: Callable[..., Any], world_size: int, *, seconds: float = DEFAULT_SECONDS, **arguments: Any
) -> list[Any]:
    """Return what the function returned in each rank; fail the test where a rank raised, died or hung.

    Args:
        function: At the top of a module; it gets a Place and the arguments.
        world_size: Ranks.
        seconds: How long the job may take.
        **arguments: Passed to the function; they must pickle.
    """
    __tracebackhide__ = True
    ended = run_ranks(function, world_size, seconds=seconds, arguments=arguments)
    culprit = first_culprit(ended)
    if culprit is not None:
        fail(f"rank {culprit.rank} of {world_size} {what_happened(culprit, seconds)}", details=story(culprit))
    return [end.report.value for end in ended if end.report is not None]


def run_ranks(
    function: Callable[..., Any], world_size: int, *, seconds: float, arguments: dict[str, Any]
) -> list[Ended]:
    """Run a function in each rank; return how each ended."""
    with tempfile.TemporaryDirectory(prefix="dstrat-testing-") as name:
        folder = Path(name)
        ranks, pipes = _start(function, world_size, folder, arguments)
        try:
            reports = _collect(pipes, seconds)
            stacks = _stacks(ranks, reports, folder)
        finally:
            _end(ranks)
        return [
            Ended(
                rank=rank,
                report=reports.get(rank),
                output=_text(folder / f"output-{rank}"),
                stack=stacks.get(rank, ""),
                exit_code=None if rank in stacks else process.exitcode,
            )
            for rank, process in enumerate(ranks)
        ]


def first_culprit(ended: Sequence[Ended]) -> Ended | None:
    """Return the rank that most probably caused the failure of all others; None where all have ended well."""
    failed = [end for end in ended if end.report is None or end.report.failure]
    return min(failed, key=_remoteness, default=None)


def what_happened(end: Ended, seconds: float) -> str:
    """Say how a rank failed, in a few words."""
    if end.report is not None:
        return f"raised {end.report.headline}"
    if end.exit_code is None:
        return f"was not done after {seconds:.0f} s, and had to be ended"
    return f"died with exit code {end.exit_code}"


def story(end: Ended) -> str:
    """Return the lines that show why a rank failed."""
    if end.report is not None:
        return end.report.failure
    return end.stack or end.output[-2000:]


def _remoteness(end: Ended) -> tuple[int, int]:
    """Order failures: a rank's own first, then those without a word, then those that follow from another's."""
    if end.report is None:
        return (1, 0)
    return (0 if end.report.kind == "own" else 2, end.report.time_ns)


def _start(
    function: Callable[..., Any], world_size: int, folder: Path, arguments: dict[str, Any]
) -> tuple[list[Any], list[Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    ranks, pipes = [], []
    with listener, _hidden_main():
        for rank in range(world_size):
            receiving, sending = context.Pipe()
            place = (rank, world_size, listener.getsockname()[1], listener if rank == 0 else None)
            process = context.Process(
                target=run_rank, args=(sending, place, folder, list(sys.path), function, arguments), daemon=False
            )
            process.start()
            sending.close()
            ranks.append(process)
            pipes.append(receiving)
    return ranks, pipes


def _collect(pipes: Sequence[Any], seconds: float) -> dict[int, Report]:
    """Wait for the reports; once a rank has failed the others get a few seconds more."""
    deadline = time.monotonic() + seconds
    waiting = dict(enumerate(pipes))
    reports: dict[int, Report] = {}
    while waiting:
        ready = connection.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            with contextlib.suppress(EOFError):
                reports[rank] = waiting[rank].recv()
            del waiting[rank]
            if rank not in reports or reports[rank].failure:
                deadline = min(deadline, time.monotonic() + _PATIENCE)
    for pipe in pipes:
        pipe.close()  # for which ranks that are done have waited
    return reports


def _stacks(ranks: Sequence[Any], reports: dict[int, Report], folder: Path) -> dict[int, str]:
    """Let the ranks that are still running without a report show where they are."""
    running = [rank for rank, process in enumerate(ranks) if rank not in reports and process.is_alive()]
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGQUIT)
    if running:
        time.sleep(_STACKS)
    return {rank: _text(folder / f"stack-{rank}") or "(it gave no stack)" for rank in running}


def _end(ranks: Sequence[Any]) -> None:
    deadline = time.monotonic() + _PARTING
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        for pid in (-process.pid, process.pid):  # its session with what it has started, then itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.join()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing pytest's main module in the new process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
