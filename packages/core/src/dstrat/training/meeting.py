"""Waiting for the other processes where one of them may never come, and saying so."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)

SECONDS_UNTOLD = 10.0
"""How long a process waits before it says so."""


@contextmanager
def waiting_is_told(trainer: Trainer, what: str) -> Iterator[None]:
    """Log, when a ``with`` block takes long in which this process waits for all others, that it does.

    Args:
        trainer: Says how many processes there are.
        what: Every process has to call.
    """
    if trainer.world_size == 1:
        yield
        return
    line = (
        f"rank {trainer.global_rank} has waited {SECONDS_UNTOLD:g} s in {what} for the others: every process calls it, "
        "also where only one writes; take it out of `if trainer.is_global_zero:` and the like"
    )
    timer = threading.Timer(SECONDS_UNTOLD, _log.warning, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
