"""Frames that a user sees in tracebacks: those of the program, without the way through dstrat."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.errors import DstratError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

FULL_TRACEBACK = "DSTRAT_FULL_TRACEBACK"
"""Environment variable that keeps all frames."""

_CORE = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = str(Path(__file__).parents[4]) + os.sep  # of a checkout, where our packages are beside each other
_PYTHON = str(Path(os.__file__).parent)
_LIBRARIES = (_CORE, _PYTHON, "<frozen ")  # dstrat, Python, its imports


def fold_frames(error: BaseException) -> None:
    """Remove our frames from the traceback of an error and those of its causes, in place.

    Frames of libraries between ours and the program's go with them, such as those of a wrapped module's ``forward``.
    Those of libraries that the program has called stay, and those in which the error was raised.  An error that our
    code has raised, and that is no DstratError, keeps all its frames: it may be a fault of ours.  So does one that is
    no ``Exception``, such as the time limit of a test, as it shows where a program was; and every error with
    ``DSTRAT_FULL_TRACEBACK=1``.  An interrupt keeps only frames of the program: it often arrives in the
    start-up, in the middle of imports, and a hundred lines of theirs would hide where the program was.

    Frames through which the error has still to go, such as that of ``fit``, cannot be removed; notebooks and pytest
    leave them out.
    """
    if os.environ.get(FULL_TRACEBACK, "0") not in ("", "0"):
        return
    if isinstance(error, KeyboardInterrupt):
        _hide_library_frames(error)
        _mark_callers()
        return
    if not isinstance(error, Exception):
        return
    for link in _chain(error):
        if _fold(link) and link is error:
            _mark_callers()


@contextmanager
def frames_folded(error: BaseException) -> Iterator[None]:
    """Fold the frames of an error, and put them back at the end: what follows may classify the error by them."""
    links = [(trace, trace.tb_next) for link in _chain(error) for trace in _frames(link)]
    fold_frames(error)
    try:
        yield
    finally:
        for trace, following in links:
            trace.tb_next = following


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        # ``raise error from error`` makes a cycle.
        if link is not None and not any(link is other for other in chain):
            chain.append(link)
            pending += [link.__cause__, link.__context__]
    return chain


def _frames(error: BaseException) -> list[TracebackType]:
    frames: list[TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames


def _fold(error: BaseException) -> bool:
    """Remove our frames from the traceback of an error; return False for an error that keeps all of them."""
    frames = _frames(error)
    kinds = [_kind_of(frame.tb_frame) for frame in frames]
    if not frames or (kinds[-1] == "ours" and not isinstance(error, DstratError)):
        return False
    remaining = [frames[0]]  # in place, as a bare ``raise`` takes the original traceback in Python 3.10
    caller = kinds[0]
    for index, (frame, kind) in enumerate(zip(frames[1:], kinds[1:], strict=True), 1):
        is_trailing = all(later == "library" for later in kinds[index:])
        if kind == "program" or (kind == "library" and (caller != "ours" or is_trailing)):
            remaining.append(frame)
        if kind != "library":
            caller = kind
    for frame, following in zip(remaining, [*remaining[1:], None], strict=True):
        frame.tb_next = following
    return True


def _mark_callers() -> None:
    """Mark our running frames by the variable with which notebooks and pytest leave a frame out."""
    frame = inspect.currentframe()
    while frame is not None and is_ours(frame):
        frame.f_locals["__tracebackhide__"] = True  # no variable of the function: Python keeps additional names
        frame = frame.f_back


def _kind_of(frame: FrameType) -> str:
    """Return whose code a frame runs: ``"ours"``, a ``"library"``'s, or the ``"program"``'s."""
    if is_ours(frame):
        return "ours"
    return "library" if _is_of_library(frame.f_code.co_filename) else "program"


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of dstrat or one of its packages."""
    file = frame.f_code.co_filename
    name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    # A program may have a name such as ours: our packages are installed, or beside the core in a checkout.
    is_package = f"-packages{os.sep}" in file or file.startswith(_PACKAGES)
    return file.startswith(_CORE) or (name.startswith("dstrat_") and is_package)


def _hide_library_frames(error: KeyboardInterrupt) -> None:
    """Keep only the caller's frame and those of the program in the traceback of an interrupt."""
    link = error.__traceback__
    while link is not None:
        while link.tb_next is not None and _is_of_library(link.tb_next.tb_frame.f_code.co_filename):
            link.tb_next = link.tb_next.tb_next
        link = link.tb_next
    error.__suppress_context__ = True  # such as an ImportError that an import was about to handle


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or f"-packages{os.sep}" in file
