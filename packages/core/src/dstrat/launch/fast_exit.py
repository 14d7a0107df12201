"""Ending a process without tearing its interpreter down, which takes half a second and more with torch."""

from __future__ import annotations

import atexit
import os
import sys

_exit_code = 1


def leave_quickly_at_exit() -> None:
    """Arrange that this process ends as soon as everything that is registered with atexit later has run."""
    atexit.register(_end)  # the first to be registered is the last to run


def set_exit_code(code: int) -> None:
    """Say with which code the process will end; without a word it is 1."""
    global _exit_code  # noqa: PLW0603 - an atexit handler is not told
    _exit_code = code


def leave(code: int) -> None:
    """Run what is registered with atexit, and end the process, whatever is left of the program."""
    set_exit_code(code)
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to run them before the interpreter ends


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(_exit_code)
