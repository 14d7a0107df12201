"""Noting the signals that ask a job to stop, so that its supervisor can stop it in order."""

from __future__ import annotations

import os
import signal
import stat
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from typing_extensions import Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The signals to stop that have arrived within a ``with`` block, instead of their usual effect.

    Ignored signals stay ignored (``nohup``).  Only a program's main thread can do this; in another thread the signals
    keep their effect.

    Attributes:
        received: The signals, in the order in which they came.
        pauses: Whether Ctrl-Z asks to stop the processes of the job until they are continued.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.pauses = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGTSTP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not installed from Python
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Give the signals the effect that they had before; a forked rank does this first."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        if number == signal.SIGTSTP:
            self.pauses = True
            return
        self.received.append(signal.Signals(number))
        leave_lost_terminal()


def leave_lost_terminal() -> None:
    """Send what this process prints nowhere, where its terminal is gone: writing to it would raise OSError."""
    for descriptor in (1, 2):
        try:
            is_lost = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
        except OSError:  # it is closed
            continue
        if is_lost:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
