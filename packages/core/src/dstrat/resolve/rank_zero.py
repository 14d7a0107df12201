"""Calling a function once for the whole job, wherever it is called."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from dstrat.builtin.launchers import history
from dstrat.builtin.launchers.rank import this_rank
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

P = ParamSpec("P")
T = TypeVar("T")


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Let a function run in one process of the job alone; in the others it does nothing and returns None.

    It may be called before a run, in it, or after it.  The rank is that of torch's process group where there is one,
    and otherwise what torchrun, a scheduler or dstrat itself has put into the environment.  A rank that runs the script
    again up to the launch that it was started for leaves out what has been done there.  Where dstrat starts the ranks
    on several machines, each machine's first process counts before the launch.

    The function must not communicate with the other ranks, which are not in it.
    """

    @functools.wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_rank_zero() else None

    return once


def is_rank_zero(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this is the process that does what is done once for the job.

    Raises:
        ClusterError: The environment variables make no sense.
    """
    rank = this_rank()
    if history.is_behind() or (rank is not None and rank.imports_main):
        return False
    distributed = sys.modules.get("torch.distributed")  # which is not there where nobody has opened a group
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()) == 0
    return choose_cluster(None, get_catalog(), environ).live.global_rank == 0
