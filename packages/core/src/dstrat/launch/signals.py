"""Signals that stop a job, and the watchdog that ends it when its supervisor has died."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
from typing import TYPE_CHECKING, Any

from dstrat.launch.job import JOB_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path
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


# A process that ends the ranks when their supervisor is gone and can do nothing any more.


# Reads the process groups, one in a line, until the pipe from the supervisor breaks.
# What has left its group is known by its environment, where the system shows that.
_SCRIPT = """
while read -r group; do groups="$groups -$group"; done
kill -KILL $groups
for file in $(grep -lszFx "JOB_VARIABLE=$1" /proc/[0-9]*/environ); do
    pid="${file#/proc/}"; kill -KILL "${pid%/environ}"
done
rm -rf "$1"
""".replace("JOB_VARIABLE", JOB_VARIABLE)


class Watchdog:
    """A shell of its own session that waits for the supervisor's end, however it comes.

    The kernel's parent-death signal ends the ranks sooner, yet it exists on Linux only, and neither reaches what the
    ranks have started nor a rank whose parent is a fork server.

    Args:
        folder: The job's folder, to be removed in the end.
    """

    def __init__(self, folder: Path) -> None:
        self._shell = subprocess.Popen(  # noqa: S603 - nothing of the user's is in it
            ["/bin/sh", "-c", _SCRIPT, "dstrat-watchdog", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.kill()
        self.let_go()
        self._shell.wait()

    def guard(self, group: int) -> None:
        """End this process group too."""
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._shell.stdin.write(f"{group}\n".encode())
            self._shell.stdin.flush()
        except BrokenPipeError:  # somebody ended the watchdog: the supervisor itself still ends the ranks
            return

    def let_go(self) -> None:
        """Close this process's end of the pipe; a forked rank does it, as it must not keep the watchdog waiting."""
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        self._shell.stdin.close()
