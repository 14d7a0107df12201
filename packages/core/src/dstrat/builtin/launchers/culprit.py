"""Which of several failed ranks was the cause, and what to tell the user of it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import LaunchError, RankFailedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.builtin.launchers.failures import Failure

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (perhaps because the machine ran out of memory)",
    signal.SIGBUS: " (perhaps because /dev/shm is full)",
}
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


def hung_rank(ends: Sequence[RankEnd], running: Mapping[int, str]) -> int | None:
    """Return the rank that the others have waited for in vain, if that was it.

    Args:
        ends: The ranks that have ended.
        running: The stacks of the ranks that have not, by rank.
    """
    failures = [end for end in ends if end.is_failure]
    if any(end.remoteness < 2 for end in failures):
        return None
    if not any(end.failure and end.failure.kind == "timeout" for end in failures):
        return None
    # A rank that waits for others is not the one that they wait for.
    return min(running, key=lambda rank: (_waits(running[rank]), rank), default=None)


def failure_error(ends: Sequence[RankEnd], running: Mapping[int, str], world_size: int) -> LaunchError:
    """Return the error that tells the user which rank failed, and how.

    Args:
        ends: The ranks that have ended, at least one of them badly.
        running: The stacks of the ranks that had to be ended, by rank.
        world_size: Ranks of the whole job.
    """
    first = first_failure(ends)
    hung = hung_rank(ends, running)
    if hung is not None and first.failure is not None:
        stack = running[hung] or "(it gave none)"
        return RankFailedError(
            f"rank {hung} of {world_size} hung: rank {first.rank} waited for it in vain "
            f"({first.failure.headline}). Its stack when it was ended:\n\n{stack}",
            rank=hung,
            rank_traceback=stack,
        )
    if first.failure is not None and first.failure.error == _LAUNCH_ERROR:
        return LaunchError(first.failure.message)  # raised by the launcher itself, in the rank
    text = first.failure.traceback if first.failure is not None else first.stack
    message = f"rank {first.rank} of {world_size} {_what_happened(first)}{_circumstances(first, ends, running)}"
    return RankFailedError(
        f"{message}\n\n{text}" if text else message,
        rank=first.rank,
        exit_code=1 if first.failure is not None else first.exit_code,  # it may not have ended yet
        rank_traceback=text,
    )


def _waits(stack: str) -> bool:
    return any(folder in stack for folder in ("torch/distributed/", "dstrat/parallel/"))


def _what_happened(end: RankEnd) -> str:
    if end.failure is not None:
        return f"failed: {end.failure.headline}"
    code = end.exit_code
    if code is not None and code < 0:
        return f"was killed by {_signal_name(-code)}{_HINTS.get(-code, '')}"
    if not end.was_set_up:
        return f"exited with code {code} before it could run anything: is its reason printed above?"
    return f"exited with code {code}"


def _circumstances(first: RankEnd, ends: Sequence[RankEnd], running: Mapping[int, str]) -> str:
    """Say what may have broken the connection, where no rank has failed by itself."""
    if first.remoteness < 2:
        return ""
    left = [str(end.rank) for end in ends if not end.is_failure]
    if left:
        return f"\n(rank {', '.join(left)} had ended before, with exit code 0)"
    if running:
        return f"\n(rank {', '.join(map(str, running))} was still running)"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
