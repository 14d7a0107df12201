"""Calling a function, logging and warning once for the whole job, wherever it is called."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dstrat.launch import external
from dstrat.launch.rank import this_rank
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Let a function run in one process of the job alone; in the others it does nothing and returns None.

    It may be called before a run, in it, or after it.  The rank is that of torch's process group if there is one, and
    otherwise that of the environment variables of torchrun, a scheduler or dstrat.  Where dstrat starts the ranks on
    several machines, the first process of each machine counts until the launch.

    The function must not communicate with the other ranks, which are not in it.
    """

    @functools.wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return once


def rank_zero_info(message: object, *args: object) -> None:
    """Log a message in one process of the job alone; print it to stderr where the program has not set up logging.

    Args:
        message: The text, with ``%s`` and the like for the arguments.
        *args: The arguments.
    """
    if not is_rank_zero():
        return
    if _log.hasHandlers():
        _log.info(message, *args, stacklevel=2)
    else:  # where logging would show warnings and errors alone
        print(str(message) % args if args else message, file=sys.stderr, flush=True)


def rank_zero_warn(message: str | Warning, stacklevel: int = 4, category: type[Warning] = UserWarning) -> None:
    """Warn in one process of the job alone.

    Args:
        message: The text, or a warning.
        stacklevel: The line that the warning names: 4 is the caller's, 5 that of the caller's caller, as in Lightning.
        category: Of a text.
    """
    if is_rank_zero():
        warnings.warn(message, category, stacklevel=stacklevel - 2)


def is_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is the process that works for the whole job.

    Raises:
        ClusterError: The environment variables make no sense.
    """
    rank = this_rank()
    # A rank that runs the script again repeats the lines before its launch, which the first process has run already.
    if external.history.is_replayed or (rank is not None and rank.imports_main):
        return False
    distributed = sys.modules.get("torch.distributed")  # which is not there where nobody has opened a group
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()) == 0
    return choose_cluster(None, get_catalog(), environ).instance.global_rank == 0
