"""Noting the signals that ask a job to stop, so that its supervisor can stop it in order."""

from __future__ import annotations

import signal
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
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
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
        self.received.append(signal.Signals(number))
