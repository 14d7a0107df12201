"""Fast exit of a process, without the teardown of the interpreter, which takes 0.5 s and more with torch.

What users notice of a teardown still happens: handlers of atexit run, and what was written to files reaches them.

A new process imports this module before any other, and the module imports nothing of dstrat and no torch.  Handlers of
atexit run in the reverse order of their registration, and the one of this module ends the process: a handler that was
registered before it, as many libraries register one when they are imported, would never run.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import io
import os
import stat
import sys
import threading
from traceback import clear_frames
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import TracebackType

_NEEDED_BY_DESTRUCTORS = (ModuleType, type, FunctionType, BuiltinFunctionType, NoneType, str, bytes, int, float, tuple)

_exit_code = 1
_hook_is_installed = False
_has_no_peers = False


def leave_quickly_at_exit() -> None:
    """Register the fast exit with atexit; call it before any other handler is registered."""
    atexit.register(_exit_now)  # the first registered handler runs last


def set_exit_code(code: int) -> None:
    """Set the code with which the process will exit; 1 by default."""
    global _exit_code  # noqa: PLW0603 - atexit passes no exit code to handlers
    _exit_code = code


def leave(code: int) -> NoReturn:
    """Run the atexit handlers, and end the process now."""
    set_exit_code(code)
    atexit._run_exitfuncs()  # noqa: SLF001 - the only way to run them before the interpreter ends
    _exit_now()


def leave_quickly_at_exit_of_server() -> None:
    """Register the same for multiprocessing's fork server, which exits with code 0."""
    server = os.getpid()
    set_exit_code(0)
    # Its children inherit the handler, and from Python 3.13 on they call it.
    atexit.register(lambda: _exit_now() if os.getpid() == server else None)


def leave_quickly_if_uncaught(*, has_peers: bool) -> None:
    """Let an exception that nobody catches end this process quickly: peers and a launcher wait for its end.

    It has no effect where the process goes on after such an exception, as in an interactive session, or has to wait
    for threads.

    Args:
        has_peers: Whether the process is a rank, whose objects may wait for other ranks when they are released.
    """
    global _hook_is_installed, _has_no_peers  # noqa: PLW0603 - a program may call launch often
    _has_no_peers = not has_peers
    if _hook_is_installed:
        return
    _hook_is_installed = True
    previous_hook = sys.excepthook

    def show_and_leave(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous_hook(kind, value, trace)
        # The interpreter itself calls the hook at the end of a program; consoles call it from their loop.
        is_called_at_end = sys._getframe().f_back is None  # noqa: SLF001 - there is no other way
        # After KeyboardInterrupt, Python ends by the signal, as shells expect.
        if is_called_at_end and issubclass(kind, Exception) and not (_is_interactive() or _has_threads()):
            if _has_no_peers:
                clear_frames(trace)  # releases local variables of the program, as _release_main does global ones
            leave(1)

    sys.excepthook = show_and_leave


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or bool(os.environ.get("PYTHONINSPECT"))


def _has_threads() -> bool:
    """Return whether threads run that the interpreter would wait for."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _exit_now() -> NoReturn:
    if _exit_code == 0 or _has_no_peers:  # after a failure of a rank, destructors could wait for peers
        _release_main()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    _write_out_files()
    os._exit(_exit_code)


def _release_main() -> None:
    """Release the objects of the program, whose destructors may write files: archives, HDF5 and others.

    Modules, functions, classes and constants stay, as the destructors use them.
    """
    threading.excepthook = lambda _: None  # daemon threads may miss the objects, and nobody needs to know
    variables = vars(sys.modules["__main__"])
    for name, value in list(variables.items()):
        if not (name.startswith("__") or isinstance(value, _NEEDED_BY_DESTRUCTORS)):
            del variables[name]
        del value  # the last reference


def _write_out_files() -> None:
    """Write out all files that were not closed, as their destructors would."""
    if not _has_writable_files():  # as in most programs, which the search below would delay
        return
    values = gc.get_objects()  # some 400,000 with torch, which takes 0.1 s
    # By type, as isinstance is slow for an abstract class, and runs the code of proxies, which have a __class__.
    file_types = {kind for kind in set(map(type, values)) if issubclass(kind, io.IOBase)}
    opened = [value for value in values if type(value) in file_types]
    for value in sorted(opened, key=_layer_of):
        with contextlib.suppress(Exception):  # closed, detached, or a full disk: nobody is left to tell
            value.close() if _layer_of(value) == 1 else value.flush()  # gzip writes its last bytes in close only


def _has_writable_files() -> bool:
    """Return whether the process has regular files open for writing, beside its standard streams."""
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 - descriptors, not paths
        with contextlib.suppress(OSError):  # that of the listing itself
            descriptor = int(name)
            is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
            if descriptor > 2 and is_writable and stat.S_ISREG(os.fstat(descriptor).st_mode):
                return True
    return False


def _layer_of(value: io.IOBase) -> int:
    """Return 0 for a text, 1 for a file that is written in Python such as that of gzip, 2 for a buffer.

    Each layer may write to the next.
    """
    if isinstance(value, io.TextIOBase):
        return 0
    return 2 if type(value).__module__.startswith("_io") else 1
