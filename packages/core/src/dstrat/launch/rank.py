"""Life of a rank around the user's function or script."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import process, spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import LaunchError, MisuseError
from dstrat.launch.failures import write_failure
from dstrat.launch.job import JOB_VARIABLE, PID_VARIABLE, read_payload, unpicklable_part, write_payload

if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import partial

STACK_SIGNAL = signal.SIGQUIT
"""On this signal a rank writes the stacks of its threads into its stack file, and goes on."""

_FUNCTION_FILE = "function.pickle"
_MAIN_FILE = "main.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(kw_only=True, slots=True)
class ThisRank:
    """The state of a rank in its own process.

    Attributes:
        folder: The job's folder.
        runs_script: Whether the rank runs the whole script, or one function.
        imports_main: Whether the script is being imported now, so that the function can be found in it.
    """

    folder: Path
    runs_script: bool
    imports_main: bool = False


_this_rank: ThisRank | None = None


def this_rank() -> ThisRank | None:
    """Return the state of this process as a rank; None where it is not one that dstrat has started."""
    return _this_rank


def enter_rank(folder: Path, *, runs_script: bool, parent: int | None) -> None:
    """Make this process a rank: it dies with its parent, and shows its stack when asked.

    Args:
        folder: The job's folder.
        runs_script: Whether it is going to run the whole script.
        parent: The process that has started it; None where only the watchdog tells that the supervisor is gone.
    """
    global _this_rank  # noqa: PLW0603 - what this process is cannot be passed through the user's script
    _die_with(parent)
    _this_rank = ThisRank(folder=folder, runs_script=runs_script)
    os.environ[JOB_VARIABLE] = str(folder)
    os.environ[PID_VARIABLE] = str(os.getpid())
    # Sockets of multiprocessing, as of a DataLoader's workers: their folder would stay where a process is killed.
    process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
    stacks = stack_file(folder, os.getpid()).open("ab", buffering=0)  # to append, as the supervisor empties it
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def stack_file(folder: Path, pid: int) -> Path:
    """Return where a rank writes its stacks; the file is there as soon as the rank is set up."""
    return folder / f"stack-{pid}.txt"


def signal_file(folder: Path, pid: int) -> Path:
    """Return where a rank notes a signal by which it was asked to stop."""
    return folder / f"signal-{pid}"


def note_signal(number: int) -> None:
    """Leave the supervisor a note that this rank was asked to stop, as whoever asked may not have asked all ranks."""
    if _this_rank is not None:
        with contextlib.suppress(OSError):
            signal_file(_this_rank.folder, os.getpid()).write_text(str(number))


def result_file(folder: Path) -> Path:
    """Return where rank 0 leaves what the function has returned."""
    return folder / "result.pickle"


def exit_code_of(folder: Path, run: Callable[[], object]) -> int:
    """Run something, and turn whatever escapes into an exit code and a file in the job's folder."""
    try:
        run()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        write_failure(folder, error)
    except BaseException as error:  # noqa: BLE001 - the supervisor tells the user
        write_failure(folder, error)
    else:
        return 0
    return 1


def leave_function(folder: Path, call: partial[Any]) -> None:
    """Leave a function and its arguments for the ranks, and how they find the script that it may be defined in.

    Raises:
        Exception: Whatever the pickling of something raises.
    """
    write_payload(folder / _FUNCTION_FILE, (call.func, call.args, call.keywords))
    main = spawn.get_preparation_data("rank")
    main.pop("authkey")  # secret, and of use only to processes that talk through multiprocessing
    (folder / _MAIN_FILE).write_text(json.dumps(main))


def run_function(folder: Path) -> None:
    """Import the user's script as multiprocessing does, then run the function that the supervisor has left."""
    rank = this_rank()
    assert rank is not None  # noqa: S101 - enter_rank comes first
    rank.imports_main = True
    spawn.prepare(json.loads((folder / _MAIN_FILE).read_text()))
    rank.imports_main = False
    function, args, kwargs = read_payload(folder / _FUNCTION_FILE)
    return_result(folder, function(*args, **kwargs))


def return_result(folder: Path, result: object) -> None:
    """Leave the function's result for the supervisor, in rank 0.

    Raises:
        MisuseError: It cannot be pickled.
    """
    if os.environ["RANK"] != "0":
        return
    try:
        write_payload(result_file(folder), result)
    except Exception as error:
        raise MisuseError(
            f"the function's result cannot be sent back to the process that launched it, because "
            f"{unpicklable_part({'result': result})} cannot be pickled: {error}"
        ) from error


def main_guard_error() -> LaunchError:
    """Return the error for a script that launches again while a rank imports it."""
    script = Path(sys.argv[0]).name
    return LaunchError(
        f"each rank imports {script} to find the function that it runs, and on import {script} launches again: put "
        "the part that trains under `if __name__ == \"__main__\":`, or choose start_method='popen'"
    )


def die_with_supervisor(pid: int) -> None:
    """Kill this process and its group when another process ends, of which it is no child."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        supervisor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # an old kernel
        return

    end = select.poll()
    end.register(supervisor, select.POLLIN)

    def wait() -> None:
        end.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, name="dstrat-supervisor-watch", daemon=True).start()


def _die_with(parent: int | None) -> None:
    """Let the kernel end this process when its parent dies, in whatever way."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
