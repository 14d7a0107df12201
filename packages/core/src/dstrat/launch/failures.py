"""Failures of ranks: classify, write, read, and find the primary one."""

from __future__ import annotations

import dis
import json
import os
import re
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dstrat.errors import LaunchError, PeerError, RankFailedError
from dstrat.launch.nccl_status import has_pending
from dstrat.launch.progress import waits_for_peers
from dstrat.launch.tracebacks import frames_folded, is_ours

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from types import FrameType, TracebackType


FailureKind = Literal["error", "lost", "timeout"]
"""An error of the rank itself, a lost connection to a peer, or a timeout while it waited for a peer."""

# Texts of Gloo, NCCL and torch's store, of torch 2.9 to 2.13; one that is missing here counts as the rank's own error.
_LOST = re.compile(
    r"connection (reset|closed) by peer|connection refused|broken pipe|socket closed|recvValue failed|"
    r"failed to recv|connectFullMesh failed|remote process exit|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"timed out waiting|timeout waiting for key|wait timeout|socket timeout|timed out after|"
    r"failed to pass monitoredBarrier|collective operation timeout|application timeout caused pair closure|"
    r"watchdog (got stuck|caught collective)",
    re.IGNORECASE,
)
_COMMUNICATION = (os.path.join("torch", "distributed", ""), os.path.join("dstrat", "parallel", ""))  # noqa: PTH118
_OUR_FOLDER = str(Path(__file__).parent)
_STARTERS = ("runpy", "multiprocessing.spawn")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that ended a rank.

    Attributes:
        kind: Whether the rank itself or a peer was the cause.
        error: Name of the exception's class.
        message: The exception's text.
        traceback: The rank's traceback, as text.
        time_ns: When it was caught, nanoseconds since the epoch.
    """

    kind: FailureKind
    error: str
    message: str
    traceback: str
    time_ns: int

    @property
    def headline(self) -> str:
        """The exception in one line."""
        first_line = self.message.strip().partition("\n")[0]
        return f"{self.error}: {first_line}" if first_line else self.error


def kind_of(error: BaseException) -> FailureKind:
    """Classify the error of a rank: its own, a lost connection, or a timeout.

    torch raises RuntimeError or a subclass of it (torch.distributed.DistError) for the last two.  Only the text
    distinguishes them, unless it is a PeerError.  An error that was raised while one of these was handled is classified
    like it.
    """
    link: BaseException | None = error
    seen: set[int] = set()  # ``raise error from error`` makes a cycle
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, PeerError):
            return "timeout" if link.timed_out else "lost"
        if isinstance(link, RuntimeError) and _is_raised_by_communication(link):
            if _TIMEOUT.search(text_of(link)):
                return "timeout"
            if _LOST.search(text_of(link)):
                return "lost"
        link = link.__context__ if link.__cause__ is None else link.__cause__
    return "error"


def _is_raised_by_communication(error: BaseException) -> bool:
    """Return whether an error comes from native code, such as Gloo or NCCL, or from Python code that communicates.

    A ``raise`` in the user's code or in a DataLoader may have the same text.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    # A frame that Cython made up has no instructions.
    if not 0 <= trace.tb_lasti < len(code.co_code) or dis.opname[code.co_code[trace.tb_lasti]] not in (
        "RAISE_VARARGS",
        "RERAISE",
    ):
        return True  # not a ``raise``: native code that the innermost Python frame called
    return any(folder in code.co_filename for folder in _COMMUNICATION)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, also where its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 - __str__ of any class may raise anything
        return f"(its __str__ raised {type(other).__name__})"


def describe_failure(error: BaseException) -> Failure:
    """Return an exception that ends this rank as plain values, with the frames of the program only."""
    kind = kind_of(error)  # before frames are folded, by which it judges
    with frames_folded(error):  # only here, as an error that is noted before the cleanup is classified again after it
        lines = traceback.format_exception(type(error), error, _user_traceback(error.__traceback__))
    return Failure(
        kind=kind,
        error=_class_name(type(error)),
        message=text_of(error),
        traceback="".join(lines).rstrip(),
        time_ns=time.time_ns(),
    )


def write_failure(folder: Path, error: BaseException, *, cleans_up: bool = False) -> None:
    """Write an exception of this process to the job's folder; a file that exists is complete.

    Args:
        folder: The folder.
        error: The exception.
        cleans_up: Whether the process has yet to clean up, in which it may hang.
    """
    failure = describe_failure(error)
    path = _path(folder, os.getpid(), cleans_up=cleans_up)
    unfinished = path.with_suffix(".unfinished")
    try:
        # Errors may quote file names that are no UTF-8, as lone surrogates.
        unfinished.write_text(json.dumps(asdict(failure)), encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    except OSError:  # the folder was removed, which the supervisor reports, or the disk is full
        sys.stderr.write(f"{failure.traceback}\n")


def forget_failure(folder: Path) -> None:
    """Remove what this process has written before a cleanup that has ended, as it trains again."""
    _path(folder, os.getpid(), cleans_up=True).unlink(missing_ok=True)


def forget_failures(folder: Path, pid: int) -> None:
    """Remove what a process has written that was no rank yet when it ended."""
    for cleans_up in (False, True):
        _path(folder, pid, cleans_up=cleans_up).unlink(missing_ok=True)


def read_failure(folder: Path, pid: int, *, cleans_up: bool = False) -> Failure | None:
    """Return the failure that a process wrote to the job's folder; None where there is none."""
    try:
        return Failure(**json.loads(_path(folder, pid, cleans_up=cleans_up).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _path(folder: Path, pid: int, *, cleans_up: bool) -> Path:
    return folder / f"failure-{pid}{'-before-cleanup' if cleans_up else ''}.json"


def _class_name(error: type[BaseException]) -> str:
    """Return the name of a class as a traceback shows it."""
    return (
        error.__qualname__
        if error.__module__ in ("builtins", "__main__")
        else f"{error.__module__}.{error.__qualname__}"
    )


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's frames, which are the outermost."""
    link = trace
    while link is not None and _is_of_launcher(link.tb_frame):
        link = link.tb_next
    if link is not None and link.tb_next is not None and is_ours(link.tb_frame) and not is_ours(link.tb_next.tb_frame):
        link = link.tb_next  # the one of ours that folding in place had to leave
    return link or trace  # of an error of the launcher itself, all frames


def _is_of_launcher(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OUR_FOLDER) or frame.f_globals.get("__name__") in _STARTERS


# Primary failure of a job


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: " (perhaps because the machine ran out of memory)",
    signal.SIGBUS: " (perhaps because /dev/shm is full)",
}
_COLLECTIVES = "distributed_c10d.py"  # of torch.distributed, in a stack
_MISMATCH_HINT = (
    " in a collective, which Gloo does where another rank is in another one: what the stack below calls, such as a "
    "forward pass of shards, must be called by all ranks"
)
_NO_STACK = "(not available)"
_FRAME = re.compile(r'^ *File "(.*)", line .* in (.*)$', re.MULTILINE)
_LAUNCH_ERROR = f"{LaunchError.__module__}.{LaunchError.__qualname__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of a rank, or its failure if it has not ended yet.

    Attributes:
        rank: Its global rank.
        exit_code: Negative for a signal; None when it has written a failure and not yet ended.
        failure: The exception that it wrote, if any.
        time_ns: When it failed, or when its end was noticed; nanoseconds since the epoch.
        was_set_up: Whether it reached the user's code.
        stack: Its stack at a crash, if it wrote one.
    """

    rank: int
    exit_code: int | None
    failure: Failure | None
    time_ns: int
    was_set_up: bool = True
    stack: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it raised, or exited with another code than 0."""
        return self.failure is not None or self.exit_code != 0

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended it, and no exception."""
        return self.failure is None and self.exit_code is not None and self.exit_code < 0

    @property
    def was_aborted(self) -> bool:
        """Whether a thread of native code aborted it, as NCCL's watchdog does after a timeout."""
        # A crash of the main thread has that one as its current thread.
        is_known = bool(self.stack) and "Current thread" not in self.stack
        return self.failure is None and self.exit_code == -signal.SIGABRT and is_known

    @property
    def failure_order(self) -> int:
        """Distance from the cause: 0 is a cause, 1 may be one, 2 follows from another rank's failure."""
        if self.failure is not None:
            return 0 if self.failure.kind == "error" else 2
        return 1 if self.exit_code == -signal.SIGABRT else 0  # NCCL aborts a process that has lost its peers


def primary_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the end of the rank that most probably caused the failure of the job."""
    return min((end for end in ends if end.is_failure), key=lambda end: (end.failure_order, end.time_ns))


def hung_rank(ends: Sequence[RankEnd], running: Mapping[int, str], world_size: int) -> int | None:
    """Return the rank for which the others waited until they timed out; None where that was not the cause.

    Args:
        ends: The ranks of this machine that have ended.
        running: The stacks of those that have not, by rank.
        world_size: Number of ranks in the job.
    """
    failures = [end for end in ends if end.is_failure]
    # A rank that waits in a collective is not the one that blocks it; that one may be on another machine.
    blocking = [rank for rank in running if not waits(running[rank])]
    # NCCL also aborts a rank that has lost a peer; then no rank is left that blocks the others.
    timed_out = [end for end in failures if blocking and end.was_aborted]
    if any(end.failure_order < 2 for end in failures if end not in timed_out):
        return None
    if not timed_out and not any(end.failure and end.failure.kind == "timeout" for end in failures):
        return None
    if not blocking and len(ends) + len(running) < world_size:
        return None
    return min(blocking or running, default=None)  # where all wait, their collectives do not match


def early_exit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank whose exit with code 0 made its peers fail; None where there is another cause."""
    if any(end.is_failure and end.failure_order < 2 for end in ends):
        return None
    return min((end for end in ends if not end.is_failure), key=lambda end: end.time_ns, default=None)


def failure_error(ends: Sequence[RankEnd], running: Mapping[int, str], world_size: int) -> LaunchError:
    """Return the error that names the primary failure of a job.

    Args:
        ends: The ranks that have ended, at least one of them with a failure.
        running: The stacks of the ranks that had to be ended, by rank.
        world_size: Number of ranks in the job.
    """
    primary = primary_failure(ends)
    hung = hung_rank(ends, running, world_size)
    exited = early_exit(ends)
    # An early exit explains why a rank waits, but not why one is elsewhere in its program.
    if hung is not None and (exited is None or not waits(running[hung])):
        stack = running[hung] or _NO_STACK
        peer_stacks = describe_stacks({rank: other for rank, other in running.items() if rank != hung})
        hang = f"rank {hung} of {world_size} hung: {_describe_wait(primary)}. Its stack when it was ended:"
        return RankFailedError(
            "\n\n".join([hang, stack, _traceback_of(primary), *peer_stacks]), rank=hung, rank_traceback=stack
        )
    if exited is not None:
        return RankFailedError(
            f"rank {exited.rank} of {world_size} exited with code 0 before the others had ended: "
            f"{_describe_wait(primary)}\n\n{_traceback_of(primary)}",
            rank=exited.rank,
            exit_code=0,
        )
    if primary.failure is not None and primary.failure.error == _LAUNCH_ERROR:
        return LaunchError(primary.failure.message)  # raised by the launcher itself, in the rank
    text = primary.failure.traceback if primary.failure is not None else primary.stack
    message = f"rank {primary.rank} of {world_size} {_describe_end(primary)}{_running_ranks(primary, running)}"
    return RankFailedError(
        f"{message}\n\n{text}" if text else message,
        rank=primary.rank,
        exit_code=1 if primary.failure is not None else primary.exit_code,  # it may not have ended yet
        rank_traceback=text,
        summary=primary.failure.headline if primary.failure is not None else "",
    )


def hang_error(
    idle: Mapping[int, float], running: Mapping[int, str], world_size: int, *, before_launch: Collection[int] = ()
) -> RankFailedError:
    """Return the error for a job in which some ranks were idle for too long, while their peers waited.

    Args:
        idle: Limits in seconds of the idle ranks, by rank.
        running: The stacks of all running ranks, by rank.
        world_size: Number of ranks in the job.
        before_launch: Ranks that run the script, and have not yet come to the launch that they were started for.
    """
    blocking = [rank for rank in running if rank in idle and not waits(running[rank])]
    hung = blocking or [rank for rank in running if rank in idle] or list(running)
    peers = [rank for rank in running if rank not in hung]
    peers_note = f", and {list_ranks(peers)} waited" if peers else ""
    stacks = describe_stacks({rank: running[rank] for rank in (*hung, *peers)})
    script_note = ""
    if hung[0] in before_launch:
        script_note = (
            " Each rank runs the script once more (start_method='popen'), and has to come to the same call of fit, "
            "which this one has not. A program that waits for requests, such as a server or a worker, does not come to "
            "it by itself: choose start_method='spawn' or 'forkserver' there."
        )
    message = (
        f"{list_ranks(hung)} of {world_size} hung: no progress for {max(idle.values()):g} s{peers_note}.{script_note} "
        "If this is normal, pass timeout=timedelta(minutes=...) to the strategy."
    )
    return RankFailedError(
        "\n\n".join([message, *stacks]),
        rank=hung[0],
        rank_traceback=running[hung[0]],
    )


def list_ranks(ranks: Sequence[int]) -> str:
    """Return the name of ranks in messages: ``"rank 1"``, ``"ranks 0, 2"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe_stacks(stacks: Mapping[int, str]) -> list[str]:
    """Return a paragraph for the stack of each rank."""
    return [f"Stack of rank {rank}:\n\n{stack or _NO_STACK}" for rank, stack in stacks.items()]


def _describe_wait(end: RankEnd) -> str:
    """Return the clause about a rank that failed because it waited for another one."""
    if end.failure is None:
        return f"rank {end.rank} was aborted while it waited for it, as by NCCL's watchdog after a timeout"
    verb = "timed out waiting for it" if end.failure.kind == "timeout" else "lost the connection"
    return f"rank {end.rank} {verb} ({end.failure.headline})"


def _traceback_of(end: RankEnd) -> str:
    if end.failure is None:
        return f"Stack of rank {end.rank} when it was aborted:\n\n{end.stack or _NO_STACK}"
    return f"Traceback of rank {end.rank}:\n\n{end.failure.traceback}"


def waits(stack: str, *, is_busy: bool = False) -> bool:
    """Return whether a rank waits for its peers in a collective.

    Args:
        stack: Its stacks, as faulthandler writes them; empty, or without the main thread, if not written yet.  With
            NCCL they have its line about pending collectives.
        is_busy: Whether the rank uses a processor.
    """
    if (pending := has_pending(stack)) is not None:
        return pending
    _, current, main = stack.rpartition("Current thread")
    frames = map(" in ".join, _FRAME.findall(main)) if current else ()
    return waits_for_peers(frames, is_busy=is_busy)


def _describe_end(end: RankEnd) -> str:
    if end.failure is not None:
        return f"failed: {end.failure.headline}"
    code = end.exit_code
    if code is None:
        return "ended, and its exit code is not known"
    if code < 0:
        hint = _MISMATCH_HINT if code == -signal.SIGABRT and _COLLECTIVES in end.stack else _SIGNAL_HINTS.get(-code, "")
        return f"was killed by {_signal_name(-code)}{hint}"
    if not end.was_set_up:
        return f"exited with code {code} before it ran anything: see its output above"
    return f"exited with code {code}"


def _running_ranks(primary: RankEnd, running: Mapping[int, str]) -> str:
    """Return the ranks that may have broken the connection, where no rank failed by itself."""
    if primary.failure_order < 2 or not running:
        return ""
    return f"\n({list_ranks([*running])} {'were' if len(running) > 1 else 'was'} still running)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
