"""Launcher for processes that exist already, and the record of earlier launches in a program."""

from __future__ import annotations

import os
import pickle
import sys
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dstrat.errors import LaunchError, MisuseError
from dstrat.interfaces.launcher import Launcher
from dstrat.launch import fast_exit
from dstrat.launch.failures import text_of, write_failure
from dstrat.launch.rank import ThisRank, main_guard_error, note_launch, this_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


T = TypeVar("T")


class ExternalLauncher(Launcher):
    """Calls the function in this process, which is a rank already: started by dstrat, torchrun or a scheduler.

    In a rank that dstrat has started, the first exception of the function ends the process.  An ``except`` in the
    script could otherwise let this rank continue while its peers wait for it.  Under torchrun the exception is also
    written to torchrun's error file.

    Args:
        environ: The environment, in which torchrun names its error file.

    Raises:
        MisuseError: In ``launch``: this process is in a run of several processes that has not ended.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.environ = environ

    @property
    def repeats_the_script(self) -> bool:
        return history.is_replayed

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        _refuse_within_job()
        launch = history.begin_launch()  # counted in every process, as launches are numbered alike in all of them
        rank = this_rank()
        if rank is not None:
            return _launch_in(rank, launch, lambda: function(*args, **kwargs))
        try:
            if "TORCHELASTIC_ERROR_FILE" in self.environ:
                from torch.distributed.elastic.multiprocessing.errors import record

                return cast("T", record(function)(*args, **kwargs))  # None only without a function
            return function(*args, **kwargs)
        except Exception:
            fast_exit.leave_quickly_if_uncaught(has_peers=True)
            raise


def _refuse_within_job() -> None:
    """Refuse a launch in a step or hook of a run, which other ranks may not call."""
    jobs = sys.modules.get("dstrat.parallel.job")  # not imported, as it needs torch
    if jobs is not None and jobs.current_job() is not None:
        rank, size = jobs.rank_and_size()
        raise MisuseError(
            f"a run of several processes cannot begin within another one: this process is rank {rank} of {size} in a "
            "run that has not ended, whose other ranks may not begin this one. Call it before or after that run, or in "
            "a program of its own: subprocess.run([sys.executable, 'program.py'])"
        )


def _launch_in(rank: ThisRank, launch: int, call: Callable[[], T]) -> T:
    """Call the function in a rank that dstrat has started."""
    if rank.imports_main:
        raise main_guard_error()
    if not rank.runs_script:  # a launch within the function, such as a second fit
        return call()
    if (failed := history.past_failure(launch)) is not None:
        raise failed
    if not history.is_replayed:
        note_launch()
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - any exception ends the rank
        write_failure(rank.folder, error)
        fast_exit.leave(1)


class LaunchHistory:
    """The launches of this program until now, and values that it computes once.

    Ranks that re-run the script pass all launches before theirs, and those that failed raise the same error again.
    """

    _FILE = "history.pickle"

    def __init__(self) -> None:
        self._num_begun = 0
        self._started_for = -1  # the launch for which a supervisor has started this process; -1 without one
        self._failed: dict[int, bytes] = {}  # pickled, because an exception keeps its traceback's frames alive
        self._remembered: dict[str, Any] = {}

    def begin_launch(self) -> int:
        """Return the number of the launch that begins now, from 0, and count it."""
        self._num_begun += 1
        return self.current_launch

    @property
    def current_launch(self) -> int:
        """Number of the latest launch; -1 in a rank that runs only one function in a fresh interpreter."""
        return self._num_begun - 1

    @property
    def is_replayed(self) -> bool:
        """Whether this process re-runs a program, and has not yet reached the launch that it was started for."""
        return self._started_for >= self._num_begun

    def record_failure(self, launch: int, error: BaseException) -> None:
        """Record the error of a launch."""
        try:
            self._failed[launch] = pickle.dumps(error)
        except Exception:  # noqa: BLE001 - the user's exception cannot be pickled; its text can
            self._failed[launch] = pickle.dumps(LaunchError(f"{type(error).__name__}: {text_of(error)}"))

    def past_failure(self, launch: int) -> BaseException | None:
        """Return the error of a launch in the process that started this rank; None if it succeeded."""
        if launch not in self._failed:
            return None
        return cast("BaseException", pickle.loads(self._failed[launch]))  # noqa: S301 - written by record_failure

    def remember(self, name: str, compute: Callable[[], T], *, again: bool = False) -> T:
        """Return a value that ranks which re-run the program get from this process, and do not compute.

        Args:
            name: Its name in the program.
            compute: Called once in the program; returns a value that can be pickled, such as the text of a file that
                may be gone when a rank begins.
            again: Whether to compute it anew, as it may have changed; not in a rank that has not reached its launch.
        """
        if name not in self._remembered or (again and not self.is_replayed):
            self._remembered[name] = compute()
        return cast("T", self._remembered[name])

    def save(self, folder: Path) -> None:
        """Write this launch's number, earlier failures and remembered values, for ranks that re-run the program."""
        record = (self.current_launch, self._failed, self._remembered)
        (folder / self._FILE).write_bytes(pickle.dumps(record))

    def load(self, folder: Path) -> None:
        """Read what the process that started this rank has saved."""
        record = pickle.loads((folder / self._FILE).read_bytes())  # noqa: S301 - by our own supervisor
        self._started_for, self._failed, self._remembered = record


history = LaunchHistory()
"""The history of the program in this process, which imports of the program may read before any launch."""
