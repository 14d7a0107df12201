"""Communication around a hand-written loop, closed however the loop ends."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.interfaces.strategy import Strategy

_log = logging.getLogger(__name__)


@contextmanager
def communicating(strategy: Strategy, end: Callable[[], None]) -> Iterator[None]:
    """Open communication; afterwards join what was trained and close it, and after an error free who waits for this.

    Args:
        strategy: Has not been set up.
        end: Tears it down.
    """
    from dstrat.builtin.launchers.progress import watched_for_hangs  # only runs need it

    try:
        with watched_for_hangs(
            strategy.hang_timeout,
            longest=strategy.timeout,
            rank=strategy.global_rank,
            local_rank=strategy.local_rank,
            size=strategy.world_size,
        ):
            strategy.setup_environment()
            yield
            strategy.finish_training()
            strategy.barrier("end")  # rank 0, which others may still need, is not to end before them
    except BaseException as error:
        _end_after(error, partial(strategy.on_exception, error), end)
        raise
    end()


def _end_after(error: BaseException, *ends: Callable[[], None]) -> None:
    """Clean up; what fails at that is told, as the error itself goes on."""
    for end in ends:
        try:
            end()
        except Exception as other:  # noqa: BLE001, PERF203 - whatever it is; there are two
            _log.error("cleaning up after %s failed too", type(error).__name__, exc_info=other)
