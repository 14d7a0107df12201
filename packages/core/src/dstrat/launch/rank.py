"""State of a rank in its process: set-up, files for the supervisor, function and result."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from multiprocessing import process, spawn
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import LaunchError, MisuseError
from dstrat.launch.failures import kind_of, write_failure
from dstrat.launch.job import JOB_VARIABLE, PID_VARIABLE, describe_unpicklable, read_payload, write_payload
from dstrat.launch.progress import launched_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.strategy import Strategy

_log = logging.getLogger(__name__)

STACK_SIGNAL = signal.SIGQUIT
"""Signal on which a rank writes the stacks of its threads to its stack file, and continues."""

_FUNCTION_FILE = "function.pickle"
_MAIN_FILE = "main.json"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(kw_only=True, slots=True)
class ThisRank:
    """The state of a rank in its own process.

    Attributes:
        folder: The job's folder.
        runs_script: Whether the rank runs the script, or only one function.
        imports_main: Whether the script is being imported, which the function's pickle may need.
    """

    folder: Path
    runs_script: bool
    imports_main: bool = False


_this_rank: ThisRank | None = None


def this_rank() -> ThisRank | None:
    """Return the state of this rank; None if dstrat did not start this process as one."""
    return _this_rank


def enter_rank(folder: Path, *, runs_script: bool, parent: int | None) -> None:
    """Set up this process as a rank, which dies with its parent and writes its stack on a signal.

    Args:
        folder: The job's folder.
        runs_script: Whether it is going to run the user's script.
        parent: The process that has started it; None if that is not the supervisor.
    """
    global _this_rank  # noqa: PLW0603 - the user's script runs in between, and cannot pass it on
    # First, as the parent may die at any time.  Its thread that has started this rank waits in ``launch``.
    die_with_parent()
    if parent is not None and os.getppid() != parent:  # it died before that
        os._exit(1)
    _this_rank = ThisRank(folder=folder, runs_script=runs_script)
    os.environ[JOB_VARIABLE] = str(folder)
    os.environ[PID_VARIABLE] = str(os.getpid())
    # For sockets of multiprocessing, such as those of a DataLoader: a killed process would leave their folder behind.
    process.current_process()._config["tempdir"] = str(folder)  # type: ignore[attr-defined]  # noqa: SLF001 - no other way
    stacks = stack_file(folder, os.getpid()).open("ab", buffering=0)  # to append, as the supervisor empties it
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)


def stack_file(folder: Path, pid: int) -> Path:
    """Return the path of a rank's stack file, which exists as soon as the rank is set up."""
    return folder / f"stack-{pid}.txt"


def signal_file(folder: Path, pid: int) -> Path:
    """Return the path of the file in which a rank records a stop signal that it received."""
    return folder / f"signal-{pid}"


def note_signal(number: int) -> None:
    """Record for the supervisor that this rank received a stop signal, which may not have reached all ranks."""
    if _this_rank is not None:
        with contextlib.suppress(OSError):
            signal_file(_this_rank.folder, os.getpid()).write_text(str(number))


def note_failure(error: BaseException) -> None:
    """Record an error of this rank for the supervisor before the cleanup, in which the rank may hang."""
    if _this_rank is not None and kind_of(error) == "error":
        write_failure(_this_rank.folder, error, cleans_up=True)


def clean_up_after(error: BaseException, strategy: Strategy, steps: Iterable[Callable[[], None]]) -> None:
    """Record the error of a run in this rank, complete its write, and run further steps of its cleanup.

    Args:
        error: What the caller raises; errors of the cleanup itself are logged.
        strategy: Of the run, with its communication, which a further step closes.
        steps: The further steps, each of which runs also if one before it fails.
    """
    from dstrat.checkpoint.async_io import finish_write
    from dstrat.interfaces.strategy import log_out_of_memory
    from dstrat.launch.ended_peers import name_ended_ranks

    first = (
        partial(note_failure, error),
        partial(log_out_of_memory, strategy, error),  # before anything is freed
        partial(name_ended_ranks, error),  # needs the process group, as does
        partial(finish_write, strategy, error, logs=kind_of(error) == "error"),
    )
    for other in run_all([*first, *steps]):
        _log.error("cleaning up after %s failed too", type(error).__name__, exc_info=other)


def run_all(steps: Iterable[Callable[[], None]]) -> list[Exception]:
    """Run all steps, also after one that fails, and return the errors."""
    errors = []
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001, PERF203 - the caller logs or raises it
            errors.append(error)
    return errors


def note_launch() -> None:
    """Record for the supervisor that this rank has come to the launch that it is for."""
    if _this_rank is not None:
        with contextlib.suppress(OSError):  # the folder may have been removed
            launched_file(_this_rank.folder, os.getpid()).touch()


def result_file(folder: Path) -> Path:
    """Return the path of the file with the function's result, which rank 0 writes."""
    return folder / "result.pickle"


def exit_code_of(folder: Path, run: Callable[[], object]) -> int:
    """Run a function, and return the exit code; an exception is written to the job's folder."""
    try:
        run()
    except KeyboardInterrupt:  # no failure: the job is being stopped
        return 128 + signal.SIGINT
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        write_failure(folder, error)  # sys.exit("message")
    except BaseException as error:  # noqa: BLE001 - the supervisor reports it
        write_failure(folder, error)
    else:
        return 0
    return 1


def write_function(folder: Path, call: partial[Any]) -> None:
    """Write a function, its arguments and the location of the script for the ranks.

    Raises:
        Exception: Any error of the pickling.
    """
    write_payload(folder / _FUNCTION_FILE, (call.func, call.args, call.keywords))
    main = spawn.get_preparation_data("rank")  # undocumented, as prepare is below; the same in Python 3.10 to 3.13
    main.pop("authkey")  # secret, and needed only for connections of multiprocessing
    (folder / _MAIN_FILE).write_text(json.dumps(main))  # apart from the pickle, which may need the script imported


def run_function(folder: Path) -> None:
    """Import the user's script as multiprocessing does, then run the function that the supervisor has written."""
    rank = this_rank()
    assert rank is not None  # noqa: S101 - enter_rank comes first
    rank.imports_main = True
    spawn.prepare(json.loads((folder / _MAIN_FILE).read_text()))
    rank.imports_main = False
    function, args, kwargs = read_payload(folder / _FUNCTION_FILE)
    note_launch()
    write_result(folder, function(*args, **kwargs))


def write_result(folder: Path, result: object) -> None:
    """Write the function's result for the supervisor, in rank 0.

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
            f"{describe_unpicklable({'result': result})} cannot be pickled: {error}"
        ) from error


def main_guard_error() -> LaunchError:
    """Return the error for a script that launches again while a rank imports it."""
    script = Path(sys.argv[0]).name
    return LaunchError(
        f"each rank imports {script} to find the function that it runs, and on import {script} launches again: put "
        "the part that trains under `if __name__ == \"__main__\":`, or choose start_method='popen'"
    )


def die_with_supervisor(pid: int) -> None:
    """Kill this process and its group when the supervisor ends, which is not its parent."""
    if not hasattr(os, "pidfd_open"):  # not on macOS, where the watchdog ends it
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


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; without effect elsewhere than on Linux."""
    # More exactly, when the thread ends that has started it, see prctl(2).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
