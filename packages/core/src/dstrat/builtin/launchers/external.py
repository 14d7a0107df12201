"""The launcher for processes that exist already."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dstrat.builtin.launchers import history, leaving
from dstrat.builtin.launchers.failures import write_failure
from dstrat.builtin.launchers.rank import ThisRank, main_guard_error, this_rank
from dstrat.interfaces.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


class ExternalLauncher(Launcher):
    """Calls the function in this process, which is a rank already: started by dstrat, torchrun or a scheduler.

    In a rank that dstrat has started the first exception of the function ends the process, so that no ``except`` of
    the script lets this rank go on while the others wait for it.  Under torchrun the exception is also left where
    torchrun looks for it.

    Args:
        environ: The environment, to be asked whether torchrun wants to know of errors.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.environ = environ

    @property
    def repeats_the_script(self) -> bool:
        return history.is_behind()

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        launch = history.next_launch()
        rank = this_rank()
        if rank is not None:
            return _launch_in(rank, launch, lambda: function(*args, **kwargs))
        if "TORCHELASTIC_ERROR_FILE" in self.environ:
            from torch.distributed.elastic.multiprocessing.errors import record

            return cast("T", record(function)(*args, **kwargs))  # None only where there is no function
        return function(*args, **kwargs)


def _launch_in(rank: ThisRank, launch: int, call: Callable[[], T]) -> T:
    """Call the function in a rank that dstrat has started."""
    if rank.imports_main:
        raise main_guard_error()
    if not rank.runs_script:
        return call()
    if (failed := history.past_failure(launch)) is not None:
        raise failed
    try:
        return call()
    except Exception as error:
        write_failure(rank.folder, error)
        leaving.leave(1)
        raise
