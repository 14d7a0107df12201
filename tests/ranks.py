"""Functions of a test's file, run in several ranks that cost a fraction of a second and take warnings for errors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

from dstrat.testing.ranks.jobs import describe_end, format_failure, primary_failure, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping

    from dstrat.testing.ranks.team import LoopbackCluster, RankContext

SECONDS = 100.0


def in_ranks(
    function: Callable[..., Any], world_size: int = 2, /, *, may_die: Collection[int] = (), **arguments: Any
) -> list[Any]:
    """Return what a function returns in each rank, None for those that may die and did.

    Args:
        function: At the top of a test file; it gets the cluster of its rank, and the arguments.
        world_size: Ranks.
        may_die: Ranks that may end without a word.
        **arguments: Passed to the function; they must pickle.
    """
    __tracebackhide__ = True
    given = {"function": function, "arguments": arguments}
    ended = run_ranks(_strictly, world_size, seconds=SECONDS, arguments=given)
    culprit = primary_failure([end for end in ended if end.report is not None or end.rank not in may_die])
    if culprit is not None:
        pytest.fail(
            f"rank {culprit.rank} of {world_size} {describe_end(culprit, SECONDS)}\n"
            f"{culprit.output}{format_failure(culprit)}"
        )
    return [None if end.report is None else end.report.value for end in ended]


def each(
    cluster: LoopbackCluster, function: Callable[..., Any], cases: Mapping[Hashable, Mapping[str, Any]]
) -> dict[Hashable, Any]:
    """Return what a function returns in each case, one after the other in the same ranks."""
    return {name: _named(name, function, cluster, arguments) for name, arguments in cases.items()}


def _named(name: Hashable, function: Callable[..., Any], cluster: LoopbackCluster, arguments: Mapping[str, Any]) -> Any:
    print("in the case", repr(name))  # which is shown where the rank fails
    return function(cluster, **arguments)


def _strictly(place: RankContext, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    warnings.simplefilter("error")
    # Raised by torch's own torch.distributed.optim when it is imported.
    for category in (DeprecationWarning, FutureWarning):  # from torch 2.15 on the second one
        warnings.filterwarnings("ignore", message=r".torch.jit.\w+. is deprecated", category=category)
    return function(place.cluster, **arguments)
