"""New ranks of an elastic fit, which take the places of those that were killed, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.parallel.process_group import wait_for_all_ranks
from dstrat.training.loops.stopping import Votes, stop_by

if TYPE_CHECKING:
    from dstrat.training.run import Run


class GroupGrows(Exception):  # noqa: N818 - no error
    """The ranks have saved a checkpoint, from which they go on together with new ones."""


def newcomers_wait(run: Run) -> bool:
    """Return whether new processes wait to take the places of ranks that were killed."""
    if run.plan.elastic != "replace":
        return False
    from dstrat.launch.elastic import has_newcomers

    return has_newcomers()


def admit_newcomers(run: Run) -> None:
    """Save a checkpoint in memory between two steps, and leave the group, for one with new ranks; collective.

    Raises:
        GroupGrows: The checkpoint is complete.
    """
    callback: Any = next(callback for callback in run.callbacks if callback.saves_in_memory)
    callback.save_now(run.trainer)
    # A signal that has arrived meanwhile comes first.
    (signal,) = Votes(run.strategy, beat=run.beat).take(0, run.interruption.requested)
    if signal:
        stop_by(signal)
    wait_for_all_ranks("save a checkpoint for new ranks")  # Gloo fails in a rank that communicates when another leaves
    raise GroupGrows("the ranks have left their group for one with new processes, and none was formed in time")
