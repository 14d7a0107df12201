"""Failure files of ranks: classify, write and read exceptions."""

from __future__ import annotations

import dis
import json
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
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
