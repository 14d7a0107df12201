"""Ranks that stay and run one function after another, as copies of a process that has loaded torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.builtin.launchers.processes import hidden_main
from dstrat.testing.rank import Report, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_PATIENCE = 8.0  # seconds for the others after one rank has failed
_STACKS = 0.5  # seconds for a rank to write its stack
_PARTING = 1.0  # seconds for ranks to end after they have reported
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "dstrat.testing.rank", "dstrat.testing.fits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a rank ended a function.

    Attributes:
        rank: Its rank.
        report: What it sent; None where it sent nothing.
        output: What it printed.
        stack: Where it was when its time was up; empty where it ended by itself.
        exit_code: Negative for a signal; None where it had to be ended, or has not ended.
    """

    rank: int
    report: Report | None
    output: str
    stack: str
    exit_code: int | None

    @property
    def has_failed(self) -> bool:
        """Whether the function did not return."""
        return self.report is None or bool(self.report.failure)


def begin_loading(*modules: str) -> None:
    """Start the process that ranks are copies of, unless there is one; it loads torch and modules beside the tests."""
    multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
    forkserver.ensure_running()


class Team:
    """Ranks of a job that find each other on the loopback.

    Args:
        world_size: How many.

    Attributes:
        is_as_before: Whether another function would find them as the first one did.
    """

    def __init__(self, world_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dstrat-testing-"))
        self._ranks, self._pipes = _start(world_size, self._folder)
        self._has_ended = False
        self.is_as_before = True

    def run(self, function: Callable[..., Any], *, seconds: float, arguments: dict[str, Any]) -> list[Ended]:
        """Run a function in each rank, with a Place and the arguments; return how each ended it.

        Where one fails, the others have a few seconds more, and then all are ended.
        """
        work = Path(tempfile.mkdtemp(prefix="work-", dir=self._folder))
        self._begin(function, work, arguments)
        reports, silent = _collect(self._pipes, seconds)
        stacks = {}
        if len(reports) < len(self._ranks) or any(report.failure for report in reports.values()):
            stacks = self._end(silent)
        self.is_as_before = not self._has_ended and all(report.is_as_before for report in reports.values())
        shutil.rmtree(work, ignore_errors=True)
        return [
            Ended(
                rank=rank,
                report=reports.get(rank),
                output=_text(self._folder / f"output-{rank}"),
                stack=stacks.get(rank, ""),
                exit_code=None if rank in stacks else process.exitcode,
            )
            for rank, process in enumerate(self._ranks)
        ]

    def close(self) -> None:
        """End the ranks and whatever they have started."""
        if not self._has_ended:
            self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self, function: Callable[..., Any], work: Path, arguments: dict[str, Any]) -> None:
        for rank, pipe in enumerate(self._pipes):
            output = self._folder / f"output-{rank}"
            if output.exists():
                os.truncate(output, 0)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: there will be no report
                pipe.send(list(sys.path))
                pipe.send((function, work, arguments))

    def _end(self, silent: Collection[int] = ()) -> dict[int, str]:
        """End the ranks; return where those were that are still busy."""
        for pipe in self._pipes:
            pipe.close()  # for which ranks that are done wait
        stacks = _stacks(self._ranks, silent, self._folder)
        _kill(self._ranks)
        self._has_ended = True
        return stacks


def _start(world_size: int, folder: Path) -> tuple[list[Any], list[Any]]:
    begin_loading()
    context = multiprocessing.get_context("forkserver")
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    ranks, pipes = [], []
    with listener, hidden_main():
        for rank in range(world_size):
            own, theirs = context.Pipe()
            place = (rank, world_size, listener.getsockname()[1], listener if rank == 0 else None)
            process = context.Process(target=run_rank, args=(theirs, place, folder), daemon=False)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(own)
    return ranks, pipes


def _collect(pipes: Sequence[Any], seconds: float) -> tuple[dict[int, Report], Collection[int]]:
    """Wait for the reports, once a rank has failed for a few seconds only; return them, and which ranks are busy."""
    deadline = time.monotonic() + seconds
    waiting = dict(enumerate(pipes))
    reports: dict[int, Report] = {}
    while waiting:
        ready = connection.wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            with contextlib.suppress(EOFError, ConnectionResetError):
                reports[rank] = waiting[rank].recv()
            del waiting[rank]
            if rank not in reports or reports[rank].failure:
                deadline = min(deadline, time.monotonic() + _PATIENCE)
    return reports, waiting.keys()


def _stacks(ranks: Sequence[Any], silent: Collection[int], folder: Path) -> dict[int, str]:
    """Let the ranks that are still busy show where they are."""
    for rank in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGQUIT)
    if silent:
        time.sleep(_STACKS)
    return {rank: _text(folder / f"stack-{rank}") or "(it gave no stack)" for rank in silent}


def _kill(ranks: Sequence[Any]) -> None:
    deadline = time.monotonic() + _PARTING
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        for pid in (-process.pid, process.pid):  # its session with what it has started, then itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.join()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
