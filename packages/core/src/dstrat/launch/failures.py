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

from dstrat.errors import LaunchError, RankFailedError
from dstrat.launch.progress import waits_for_others

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType, TracebackType


FailureKind = Literal["own", "lost", "timeout"]
"""A failure of the rank's own, a lost connection to a peer, or a peer that did not answer in time."""

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
        kind: Whether a peer was the reason.
        error: Name of the exception's class.
        message: What it says.
        traceback: The rank's own traceback, as text.
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
    """Return whether a rank failed by itself, or because a peer was gone or late.

    torch raises RuntimeError or a subclass of it (torch.distributed.DistError) for both, so that the text tells them
    apart, where communication raised it.  Whatever was raised while such an error was handled follows from it.
    """
    link: BaseException | None = error
    seen: set[int] = set()  # as ``raise error from error`` makes a circle
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RuntimeError) and _is_raised_by_communication(link):
            if _TIMEOUT.search(text_of(link)):
                return "timeout"
            if _LOST.search(text_of(link)):
                return "lost"
        link = link.__context__ if link.__cause__ is None else link.__cause__
    return "own"


def _is_raised_by_communication(error: BaseException) -> bool:
    """Return whether native code raised an error, such as Gloo or NCCL, or Python code that communicates.

    A ``raise`` of the user's or of a DataLoader may have the same text.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    # A frame that Cython has made up has no instructions.
    if not 0 <= trace.tb_lasti < len(code.co_code) or dis.opname[code.co_code[trace.tb_lasti]] not in (
        "RAISE_VARARGS",
        "RERAISE",
    ):
        return True  # the innermost Python frame called what raised it
    return any(folder in code.co_filename for folder in _COMMUNICATION)


def text_of(error: BaseException) -> str:
    """Return what an exception says, also where saying it raises."""
    try:
        return str(error)
    except Exception as other:  # noqa: BLE001 - __str__ of any class may raise anything
        return f"(its __str__ raised {type(other).__name__})"


def write_failure(folder: Path, error: BaseException) -> None:
    """Leave an exception of this process in the job's folder; a file that exists is complete."""
    failure = Failure(
        kind=kind_of(error),
        error=_class_name(type(error)),
        message=text_of(error),
        traceback="".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))).rstrip(),
        time_ns=time.time_ns(),
    )
    path = _path(folder, os.getpid())
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps(asdict(failure)), encoding="utf-8", errors="backslashreplace")
        unfinished.replace(path)
    except FileNotFoundError:  # somebody has removed the folder, as the supervisor is going to say
        sys.stderr.write(f"{failure.traceback}\n")


def read_failure(folder: Path, pid: int) -> Failure | None:
    """Return what a process has left in the job's folder, if anything."""
    try:
        return Failure(**json.loads(_path(folder, pid).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _path(folder: Path, pid: int) -> Path:
    return folder / f"failure-{pid}.json"


def _class_name(error: type[BaseException]) -> str:
    """Return the class as a traceback shows it."""
    return (
        error.__qualname__
        if error.__module__ in ("builtins", "__main__")
        else f"{error.__module__}.{error.__qualname__}"
    )


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Drop the outermost frames, which belong to the launcher."""
    link = trace
    while link is not None and _is_ours(link.tb_frame):
        link = link.tb_next
    return link or trace


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OUR_FOLDER) or frame.f_globals.get("__name__") in _STARTERS


# Primary failure of a job, and the error that names its rank.


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (perhaps because the machine ran out of memory)",
    signal.SIGBUS: " (perhaps because /dev/shm is full)",
}
_FRAME = re.compile(r'^ *File "(.*)", line ', re.MULTILINE)
_LAUNCH_ERROR = f"{LaunchError.__module__}.{LaunchError.__qualname__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How a rank ended, or that it is about to.

    Attributes:
        rank: Its global rank.
        exit_code: Negative for a signal; None when it has left a failure and not yet ended.
        failure: The exception that it left, if any.
        time_ns: When it failed, or when its end was noticed; nanoseconds since the epoch.
        was_set_up: Whether it came as far as running anything of the user's.
        stack: Its stack at a crash, if it left one.
    """

    rank: int
    exit_code: int | None
    failure: Failure | None
    time_ns: int
    was_set_up: bool = True
    stack: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it ended in any other way than well."""
        return self.failure is not None or self.exit_code != 0

    @property
    def remoteness(self) -> int:
        """How far it probably is from the cause: 0 is a cause, 2 surely follows from another rank's failure."""
        if self.failure is not None:
            return 0 if self.failure.kind == "own" else 2
        return 1 if self.exit_code == -signal.SIGABRT else 0  # NCCL aborts a process that has lost its peers


def first_failure(ends: Sequence[RankEnd]) -> RankEnd:
    """Return the rank that most probably caused the failure of all others."""
    return min((end for end in ends if end.is_failure), key=lambda end: (end.remoteness, end.time_ns))


def hung_rank(ends: Sequence[RankEnd], running: Mapping[int, str], world_size: int) -> int | None:
    """Return the rank that the others have waited for in vain, if that was it.

    Args:
        ends: The ranks of this machine that have ended.
        running: The stacks of those that have not, by rank.
        world_size: Ranks of the whole job.
    """
    failures = [end for end in ends if end.is_failure]
    if any(end.remoteness < 2 for end in failures):
        return None
    if not any(end.failure and end.failure.kind == "timeout" for end in failures):
        return None
    # A rank that waits for others is not the one that they wait for; that one may be on another machine.
    elsewhere = [rank for rank in running if not waits(running[rank])]
    if not elsewhere and len(ends) + len(running) < world_size:
        return None
    return min(elsewhere or running, default=None)


def early_exit(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank that ended well while others still needed it, if that was why they failed."""
    if any(end.is_failure and end.remoteness < 2 for end in ends):
        return None
    return min((end for end in ends if not end.is_failure), key=lambda end: end.time_ns, default=None)


def failure_error(ends: Sequence[RankEnd], running: Mapping[int, str], world_size: int) -> LaunchError:
    """Return the error that tells the user which rank failed, and how.

    Args:
        ends: The ranks that have ended, at least one of them badly.
        running: The stacks of the ranks that had to be ended, by rank.
        world_size: Ranks of the whole job.
    """
    first = first_failure(ends)
    hung = hung_rank(ends, running, world_size)
    left = early_exit(ends)
    if hung is not None and (left is None or not waits(running[hung])):
        stack = running[hung] or "(it gave none)"
        return RankFailedError(
            f"rank {hung} of {world_size} hung: {_waited(first)}. Its stack when it was ended:\n\n{stack}"
            f"\n\n{_raised(first)}{_other_stacks(hung, running)}",
            rank=hung,
            rank_traceback=stack,
        )
    if left is not None:
        return RankFailedError(
            f"rank {left.rank} of {world_size} exited with code 0 before the others had ended: {_waited(first)}"
            f"\n\n{_raised(first)}",
            rank=left.rank,
            exit_code=0,
        )
    if first.failure is not None and first.failure.error == _LAUNCH_ERROR:
        return LaunchError(first.failure.message)  # raised by the launcher itself, in the rank
    text = first.failure.traceback if first.failure is not None else first.stack
    message = f"rank {first.rank} of {world_size} {_what_happened(first)}{_circumstances(first, running)}"
    return RankFailedError(
        f"{message}\n\n{text}" if text else message,
        rank=first.rank,
        exit_code=1 if first.failure is not None else first.exit_code,  # it may not have ended yet
        rank_traceback=text,
    )


def hang_error(idle: Mapping[int, float], running: Mapping[int, str], world_size: int) -> RankFailedError:
    """Return the error for ranks of which some have done nothing for too long, while the others waited.

    Args:
        idle: Limits in seconds of the ranks that did nothing, by rank.
        running: The stacks of all ranks that run, by rank.
        world_size: Ranks of the whole job.
    """
    elsewhere = [rank for rank in running if rank in idle and not waits(running[rank])]
    hung = elsewhere or [rank for rank in running if rank in idle] or list(running)
    waiting = [rank for rank in running if rank not in hung]
    others = f", and {_ranks(waiting)} waited" if waiting else ""
    stacks = [f"Stack of rank {rank}:\n\n{running[rank] or '(it gave none)'}" for rank in (*hung, *waiting)]
    return RankFailedError(
        f"{_ranks(hung)} of {world_size} hung: nothing was done for {max(idle.values()):g} s{others}. If this is "
        "normal, pass timeout=timedelta(minutes=...) to the strategy.\n\n" + "\n\n".join(stacks),
        rank=hung[0],
        rank_traceback=running[hung[0]],
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _waited(end: RankEnd) -> str:
    """Return that a rank waited in vain for the one that the sentence is about."""
    assert end.failure is not None  # noqa: S101 - only a failure tells that a rank has waited
    return f"rank {end.rank} waited for it in vain ({end.failure.headline})"


def _other_stacks(hung: int, running: Mapping[int, str]) -> str:
    return "".join(f"\n\nStack of rank {rank}:\n\n{stack}" for rank, stack in running.items() if rank != hung)


def _raised(end: RankEnd) -> str:
    assert end.failure is not None  # noqa: S101 - as above
    return f"What rank {end.rank} raised:\n\n{end.failure.traceback}"


def waits(stack: str, *, is_busy: bool = False) -> bool:
    """Return whether a rank whose stacks these are, as faulthandler writes them, waits for others.

    Args:
        stack: Empty, or without the main thread, where the rank has not written it yet.
        is_busy: Whether the rank uses a processor.
    """
    _, current, main = stack.rpartition("Current thread")
    files = _FRAME.findall(main) if current else []
    return waits_for_others(files, is_busy=is_busy)


def _what_happened(end: RankEnd) -> str:
    if end.failure is not None:
        return f"failed: {end.failure.headline}"
    code = end.exit_code
    if code is not None and code < 0:
        return f"was killed by {_signal_name(-code)}{_HINTS.get(-code, '')}"
    if not end.was_set_up:
        return f"exited with code {code} before it could run anything: is its reason printed above?"
    return f"exited with code {code}"


def _circumstances(first: RankEnd, running: Mapping[int, str]) -> str:
    """Return what may have broken the connection, where no rank has failed by itself."""
    if first.remoteness < 2 or not running:
        return ""
    return f"\n(rank {', '.join(map(str, running))} was still running)"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
