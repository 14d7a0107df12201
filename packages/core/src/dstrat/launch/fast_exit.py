"""Fast exit of a process, without the teardown of the interpreter, which takes 0.5 s and more with torch."""

from __future__ import annotations

import atexit
import os
import sys

_exit_code = 1


def leave_quickly_at_exit() -> None:
    """Register the fast exit with atexit; call it before any other handler is registered."""
    atexit.register(_end)  # the first registered handler runs last


def set_exit_code(code: int) -> None:
    """Set the code with which the process will exit; 1 by default."""
    global _exit_code  # noqa: PLW0603 - atexit passes no exit code to handlers
    _exit_code = code


def leave(code: int) -> None:
    """Run the atexit handlers, and end the process now."""
    set_exit_code(code)
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to run them before the interpreter ends


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(_exit_code)
