"""Fast exit of a process, without the teardown of the interpreter, which takes 0.5 s and more with torch."""

from __future__ import annotations

import atexit
import os
import sys

_exit_code = 1


def leave_quickly_at_exit() -> None:
    """Register the fast exit with atexit; call it before any other handler is registered."""
    atexit.register(_exit_now)  # the first registered handler runs last


def set_exit_code(code: int) -> None:
    """Set the code with which the process will exit; 1 by default."""
    global _exit_code  # noqa: PLW0603 - atexit passes no exit code to handlers
    _exit_code = code


def leave(code: int) -> None:
    """Run the atexit handlers, and end the process now."""
    set_exit_code(code)
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to run them before the interpreter ends


def leave_quickly_at_exit_of_server() -> None:
    """Register the same for multiprocessing's fork server, which exits with code 0."""
    server = os.getpid()
    set_exit_code(0)
    # Its children inherit the handler, and from Python 3.13 on they call it.
    atexit.register(lambda: _exit_now() if os.getpid() == server else None)


def _exit_now() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(_exit_code)
