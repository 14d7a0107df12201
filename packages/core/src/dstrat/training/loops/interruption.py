"""Stopping on SIGINT, SIGTERM and SIGHUP at the end of a step."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A SIGINT on which all processes agreed: they have stopped after the same step, and can still communicate."""

    signal: int = signal.SIGINT


class Terminated(SystemExit):
    """A SIGTERM or SIGHUP on which all processes agreed; its code is the one that shells expect, such as 143."""

    @property
    def signal(self) -> int:
        return int(self.code) - 128 if self.code else signal.SIGTERM


class Interruption:
    """A context that keeps a first SIGINT, SIGTERM or SIGHUP for the end of the step; a second one interrupts at once.

    What comes too late for the last step acts when the context ends.  Ignored signals stay ignored (a program in the
    background of a script, ``nohup``).

    Attributes:
        requested: Number of the signal that came, 0 before any.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._previous: dict[int, Any] = {}
        self._actions: tuple[Callable[[int], None], ...] = ()

    def __enter__(self) -> Self:
        # Only runs need them; and not in the handler, which may come in the middle of an import.
        from dstrat.builtin.launchers.interrupts import leave_lost_terminal
        from dstrat.builtin.launchers.rank import note_signal

        self.requested = 0
        self._actions = (note_signal, lambda _: leave_lost_terminal())
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not installed from Python
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()
        if self.requested and value is None:
            _act_on(self.requested)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        self.requested = number
        self._restore()
        for act in self._actions:
            act(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _act_on(number: int) -> None:
    """Do what a signal does here outside of the context, but for ending the process without the end of the run.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For another one that has no handler.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        signal.raise_signal(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(128 + number)


def stop_by(number: int) -> None:
    """Raise what a signal asks for, in every process.

    Raises:
        Interrupted: For SIGINT.
        Terminated: For another one, with the code that shells expect, such as 143 for SIGTERM.
    """
    if number == signal.SIGINT:
        raise Interrupted
    raise Terminated(128 + number)


def end_by(number: int) -> NoReturn:
    """Raise what Python ends with as a shell expects, in the process that asked for a run that a signal has ended.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For another one.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def is_by_signal(error: KeyboardInterrupt | SystemExit) -> bool:
    """Return whether a run ended by a signal, rather than by ``sys.exit``."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error.code, int) and error.code > 128)  # as in a shell
