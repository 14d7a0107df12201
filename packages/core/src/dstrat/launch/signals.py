"""Signals that stop a job, and the watchdog that ends it when its supervisor has died."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from dstrat.launch.job import JOB_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import FrameType, TracebackType

    from typing_extensions import Self


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which schedulers announce that they end a job soon."""


def stop_signals(*, includes_preemption: bool) -> tuple[signal.Signals, ...]:
    """Return the signals that stop a job; SIGUSR1 has another meaning for many programs, and stops only on request."""
    return tuple(dict.fromkeys((*STOP_SIGNALS, *(PREEMPTION_SIGNALS if includes_preemption else ()))))


class Interrupts:
    """Recorder of the stop signals that arrive within a ``with`` block, instead of their default effect.

    Ignored signals stay ignored (``nohup``).  Python sets handlers in the main thread only; in another thread the
    signals have their usual effect.

    Args:
        signals: The stop signals.

    Attributes:
        received: The signals, in the order of arrival.
        pauses: Whether Ctrl-Z has arrived, which stops the processes of the job until they are continued.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = signals
        self.received: list[signal.Signals] = []
        self.pauses = False
        self._previous: dict[signal.Signals, Any] = {}
        self._mask: set[Any] | None = None  # to restore, while the signals are blocked
        self._raises = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # Ranks have sessions of their own, so the terminal's Ctrl-Z reaches this process only.
            for number in (*self._signals, signal.SIGTSTP):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not installed from Python
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the previous handlers, also in a forked rank."""
        while self._previous:
            signal.signal(*self._previous.popitem())
        self._unblock()

    def raise_received(self) -> None:
        """Raise for the first signal that has arrived, if any.

        Raises:
            KeyboardInterrupt: It is SIGINT.
            SystemExit: It is another one.
        """
        if self.received:
            number = self.received[0]
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise for a signal within a ``with`` block at once, as in a call that waits and does not look for signals."""
        self.raise_received()
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Block the signals within a ``with`` block; a fork in it receives them when it calls :meth:`restore`."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        try:
            yield
        finally:
            self._unblock()

    def _unblock(self) -> None:
        mask, self._mask = self._mask, None
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTSTP:
            self.pauses = True
            return
        if number == signal.SIGUSR1 and number in self.received:  # schedulers may repeat it
            return
        self.received.append(signal.Signals(number))
        leave_lost_terminal()  # SIGHUP says that it has closed
        if self._raises:
            self.raise_received()


def leave_lost_terminal() -> None:
    """Redirect the output of this process to the null device if its terminal is closed; writing would raise OSError."""
    for descriptor in (1, 2):
        try:
            is_lost = stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor)
        except OSError:  # closed
            continue
        if is_lost:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def show_line(line: str) -> None:
    """Print a line to the standard error, if there is one."""
    with contextlib.suppress(OSError):  # the terminal may be closed, for which SIGHUP is sent
        print(line, file=sys.stderr, flush=True)


# Watchdog that ends the ranks when their supervisor has died


# Reads orders to guard or forget a process group, one in a line, until the pipe from the supervisor breaks.
# Processes that have left their group are found by their environment, where the system shows that.
_SCRIPT = """
while read -r order group; do
    if [ "$order" = guard ]; then groups="$groups -$group"; continue; fi
    guarded=""; for other in $groups; do [ "$other" = "-$group" ] || guarded="$guarded $other"; done
    groups="$guarded"
done
kill -KILL $groups
for file in $(grep -lszFx "JOB_VARIABLE=$1" /proc/[0-9]*/environ); do
    pid="${file#/proc/}"; kill -KILL "${pid%/environ}"
done
rm -rf "$1"
""".replace("JOB_VARIABLE", JOB_VARIABLE)


class Watchdog:
    """Shell in a separate session that waits for the end of the supervisor, also by SIGKILL.

    The kernel's parent-death signal ends the ranks sooner.  But it exists on Linux only, and reaches neither children
    of the ranks nor a rank whose parent is a fork server.

    Args:
        folder: The job's folder, which the watchdog removes at the end.
    """

    def __init__(self, folder: Path) -> None:
        # A shell, as a fork of this process would keep its memory, and a second Python takes long to start.
        self._shell = subprocess.Popen(  # noqa: S603 - a constant script
            ["/bin/sh", "-c", _SCRIPT, "dstrat-watchdog", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else who reads the job's output through a pipe would wait for the shell too
            stderr=subprocess.DEVNULL,
            cwd="/",  # keeps no file system in use
            start_new_session=True,  # beyond the reach of Ctrl-C and of a shell that kills the supervisor's group
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.kill()  # first: when the pipe breaks it would kill the groups, whose ids may be reused by now
        self.let_go()
        self._shell.wait()

    def guard(self, group: int) -> None:
        """Add a process group that the watchdog is to end."""
        self._order("guard", group)

    def forget(self, group: int) -> None:
        """Remove a process group that has ended, whose number another one may get."""
        self._order("forget", group)

    def _order(self, order: str, group: int) -> None:
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._shell.stdin.write(f"{order} {group}\n".encode())
            self._shell.stdin.flush()
        except BrokenPipeError:  # the watchdog was killed: the supervisor itself still ends the ranks
            return

    def let_go(self) -> None:
        """Close this process's end of the pipe; a forked rank must, as the watchdog waits for all ends."""
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        self._shell.stdin.close()
