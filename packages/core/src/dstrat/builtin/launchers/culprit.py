"""Primary failure of a job, and the error that names its rank."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.builtin.launchers.progress import waits_for_others
from dstrat.errors import LaunchError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.builtin.launchers.failures import Failure

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
