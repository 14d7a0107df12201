"""Preloaded module of multiprocessing's fork server: it prepares the server for signals and for its end."""

import contextlib
import os
import signal

from dstrat.launch.fast_exit import leave_quickly_at_exit_of_server


def _prepare() -> None:
    # The server ends after the process that it serves, and holds the job's output open until then.
    leave_quickly_at_exit_of_server()  # first, see that module
    from dstrat.launch.rank import die_with_parent
    from dstrat.launch.signals import STOP_SIGNALS

    # Until all is imported, which may take half a minute: an interrupted job must not wait for that.
    die_with_parent()
    # In a session of its own, as Ctrl-C in the terminal would end the server in the middle of its imports.
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    for number in STOP_SIGNALS:  # the process that started it has blocked them until now
        signal.signal(number, signal.signal(number, signal.SIG_IGN))  # drops a pending one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


# The import alone has this effect, so no other module may import this one.
_prepare()
