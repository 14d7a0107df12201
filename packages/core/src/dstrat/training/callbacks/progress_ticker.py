"""A thread that does something again and again, while another one is busy."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PROMPTS = ("bdb", "cmd", "code", "IPython", "ipdb", "pudb")


class Ticker:
    """Calls a function until it is stopped.

    Args:
        tick: Returns the seconds to wait until its next call; None ends it.
    """

    def __init__(self, tick: Callable[[], float | None]) -> None:
        self._tick = tick
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (seconds := self._tick()) is not None and not self._stopped.wait(seconds):
            pass

    def stop(self) -> None:
        """Wait for the present call, and let there be no other."""
        self._stopped.set()
        self._thread.join()


def is_at_a_prompt(thread_id: int) -> bool:
    """Return whether a thread is in a debugger or in another interactive prompt, whose line must not be touched."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - documented, for debugging
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PROMPTS:
            return True
        frame = frame.f_back
    return False
