"""Teams of ranks that run one function after another, forked from a process that has loaded torch."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.launch.failures import FailureKind, kind_of
from dstrat.launch.processes import hidden_main
from dstrat.launch.rank import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


SECONDS_AFTER_FAILURE = 8.0  # in which the other ranks may report, as the first report is not always the cause
_STACK_SECONDS = 0.5  # for a rank to write its stack
_GRACE_SECONDS = 1.0  # for ranks to end after they have reported
_MOST_CROWDED = 5.0  # times the seconds of an idle machine, whatever the load is
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "dstrat.testing.ranks.team", "dstrat.testing.ranks.fits"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """The result of a function in one rank.

    Attributes:
        rank: Its rank.
        report: What it sent; None where it sent nothing.
        output: What it printed.
        stack: Its stack at the timeout; empty where it ended by itself.
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
    # It spares each rank the import of torch, which takes longer than most functions.
    multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
    forkserver.ensure_running()


class Team:
    """Ranks of a job that find each other on the loopback.

    Args:
        world_size: Number of ranks.

    Attributes:
        is_as_before: Whether another function would find them as the first one did.
    """

    def __init__(self, world_size: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dstrat-testing-"))
        self._ranks, self._pipes = _start(world_size, self._folder)
        self._has_ended = False
        self.is_as_before = True

    def run(self, function: Callable[..., Any], *, seconds: float, arguments: dict[str, Any]) -> list[RankResult]:
        """Run a function in each rank, with a RankContext and the arguments; return the result of each.

        After the first failure the others have a few seconds more, and then all are ended.
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
            RankResult(
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
                pipe.send(list(sys.path))  # first, as the rank imports the function's module to unpickle it
                pipe.send((function, work, arguments))

    def _end(self, silent: Collection[int] = ()) -> dict[int, str]:
        """End the ranks; return the stacks of those that are still busy."""
        for pipe in self._pipes:
            pipe.close()  # ranks that have reported wait for this
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
            parent_end, child_end = context.Pipe()
            # Bound here, so that no other job of the machine can take the port before rank 0 listens on it.
            cluster_arguments = (rank, world_size, listener.getsockname()[1], listener if rank == 0 else None)
            # A daemon could not start processes, as strategies that are tested do.
            process = context.Process(target=run_rank, args=(child_end, cluster_arguments, folder), daemon=False)
            process.start()
            child_end.close()  # else its rank's death would not end the pipe
            ranks.append(process)
            pipes.append(parent_end)
    return ranks, pipes


def _collect(pipes: Sequence[Any], seconds: float) -> tuple[dict[int, Report], Collection[int]]:
    """Collect the reports, for a few seconds only once a rank has failed; return them and the ranks still busy."""
    begun = time.monotonic()
    deadline, has_failed = begun + seconds, False
    pending = dict(enumerate(pipes))
    reports: dict[int, Report] = {}
    while pending:
        ready = connection.wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            deadline = max(deadline, begun + seconds * _crowding())
            if has_failed or time.monotonic() >= deadline:
                break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            with contextlib.suppress(EOFError, ConnectionResetError):  # it has died without a report
                reports[rank] = pending[rank].recv()
            del pending[rank]
            if rank not in reports or reports[rank].failure:
                has_failed = True
                deadline = min(deadline, time.monotonic() + SECONDS_AFTER_FAILURE)
    return reports, pending.keys()


def _crowding() -> float:
    """Return how many times as long work may take as on an idle machine: how many processes wait for each core."""
    if not hasattr(os, "getloadavg"):  # Windows
        return 1.0
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_CROWDED)


def _stacks(ranks: Sequence[Any], silent: Collection[int], folder: Path) -> dict[int, str]:
    """Return the stacks of the ranks that are still busy."""
    for rank in silent:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank].pid, signal.SIGQUIT)  # for which the rank has registered faulthandler
    if silent:
        time.sleep(_STACK_SECONDS)
    return {rank: _text(folder / f"stack-{rank}") or "(it wrote no stack)" for rank in silent}


def _kill(ranks: Sequence[Any]) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        for pid in (-process.pid, process.pid):  # its session with what it has started, then itself
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.join()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# Entry point of a rank, forked from the warm process


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The report that a rank sends back.

    Attributes:
        value: What the function returned.
        failure: The traceback of its exception; empty where it returned.
        headline: The exception in one line.
        kind: Whether the failure is the rank's own.
        time_ns: When it ended, nanoseconds since the epoch.
        is_as_before: Whether another function would find the process as this one did.
    """

    value: Any = None
    failure: str = ""
    headline: str = ""
    kind: FailureKind = "error"
    time_ns: int = 0
    is_as_before: bool = False


def run_rank(pipe: Any, cluster_arguments: tuple[Any, ...], folder: Path) -> None:
    """Run each function that is sent, and send back its report.

    A rank that has failed ends, so that its closed connections end the others.  Any other rank waits until the pipe is
    closed, as others may still be connecting to it.
    """
    rank, world_size, _, _ = cluster_arguments
    _prepare(rank, folder)
    cluster = LoopbackCluster(*cluster_arguments)
    has_failed = False
    while not has_failed:
        try:
            sys.path[:] = pipe.recv()
        except EOFError:
            break
        report = _run(pipe, rank, world_size, cluster)
        pipe.send(report)
        has_failed = bool(report.failure)
    _leave()


def _run(pipe: Any, rank: int, world_size: int, cluster: LoopbackCluster) -> Report:
    try:
        function, folder, arguments = pipe.recv()  # here, so that a function that cannot be imported is reported
        rank_context = RankContext(rank=rank, world_size=world_size, folder=folder, cluster=cluster)
        value = function(rank_context, **arguments)
        return Report(value=value, time_ns=time.time_ns(), is_as_before=_is_as_before())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return Report(
            failure=traceback.format_exc(),
            headline=f"{type(error).__name__}: {error}".partition("\n")[0],
            kind=kind_of(error),
            time_ns=time.time_ns(),
        )


def _is_as_before() -> bool:
    import torch
    import torch.distributed as dist

    # The most usual leftovers.  Where another one makes the next function fail, that runs again in new ranks.
    is_open = dist.is_available() and dist.is_initialized()
    return not is_open and torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def _prepare(rank: int, folder: Path) -> None:
    gc.freeze()  # a search for garbage would visit, and so copy, all that the process it was forked from has loaded
    os.setsid()  # so that what the rank starts can be ended with it
    die_with_parent()
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / f"stack-{rank}").open("wb", buffering=0)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback))
    import torch

    torch.set_num_threads(1)  # the ranks of a team share this machine's cores


def _leave() -> None:
    """Exit without the interpreter's cleanup, which takes longer than many tests."""
    # os._exit writes no buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# Context of a function in a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContext:
    """One rank of a job.

    Attributes:
        rank: Its global rank.
        world_size: Ranks of the job.
        folder: Shared by the ranks, gone after the job.
        cluster: The cluster environment of the rank.
    """

    rank: int
    world_size: int
    folder: Path
    cluster: LoopbackCluster

    def meet(self, name: str, word: str = "here", *, seconds: float = 3.0) -> set[str]:
        """Exchange a word with the other ranks through files, without any strategy.

        Args:
            name: Identifies the exchange within the job.
            word: Letters.
            seconds: Timeout for ranks that may never arrive.

        Returns:
            The words of the ranks that arrived.
        """
        (self.folder / f"{name} {self.rank} {word}").touch()
        deadline = time.monotonic() + seconds
        while len(messages := list(self.folder.glob(f"{name} *"))) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
        return {path.name.rpartition(" ")[2] for path in messages}


# Cluster environment of the kit's ranks


class LoopbackCluster(ClusterEnvironment):
    """Running ranks of this machine, whose rendezvous is a socket that is bound to the loopback.

    Args:
        rank: Which rank this is.
        world_size: How many there are.
        port: Where rank 0 listens.
        listener: The socket that it listens on, in rank 0.
    """

    def __init__(self, rank: int, world_size: int, port: int, listener: socket.socket | None) -> None:
        super().__init__({})
        self._rank, self._world_size, self._port, self._listener = rank, world_size, port, listener

    @classmethod
    @override
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return None

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def global_rank(self) -> int:
        return self._rank

    @property
    def local_rank(self) -> int:
        return self._rank

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def listening_socket(self) -> int | None:
        return None if self._listener is None else self._listener.fileno()
