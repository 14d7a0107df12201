"""A step that breaks in one of two ranks, and how soon everybody can close then."""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from tests.hand_loop import BlockNet, batches, one_pass, parts, start
from tests.ranks import in_ranks


class Failing(BlockNet):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and dist.get_rank() == 1:
            raise ValueError("rank 1 had enough")
        return super().training_step(batch, batch_idx)


class Dying(BlockNet):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and dist.get_rank() == 1:
            os._exit(3)
        return super().training_step(batch, batch_idx)


def check_that_nobody_waits_for_a_rank_that_raises(strategy_class):
    (other, *closed), (culprit, *also_closed) = in_ranks(_until_it_breaks, strategy_class=strategy_class, cls=Failing)
    assert culprit == "ValueError: rank 1 had enough", culprit
    assert other.startswith(("RuntimeError", "DistBackendError")), other
    for seconds, still_open in (closed, also_closed):
        assert seconds < 20, seconds
        assert not still_open


def check_that_a_rank_that_dies_is_noticed(strategy_class):
    outcome, gone = in_ranks(_until_it_breaks, may_die=(1,), strategy_class=strategy_class, cls=Dying)
    message, seconds, still_open = outcome
    assert gone is None, gone
    assert message.startswith(("RuntimeError", "DistBackendError")), message
    assert seconds < 20, seconds
    assert not still_open


def _until_it_breaks(cluster, strategy_class, cls):
    """Return what broke and how long the rest took, from the exception until everything was closed."""
    strategy = strategy_class()
    start(strategy, cls(), parts(cluster))
    try:
        for index, batch in enumerate(batches()):
            one_pass(strategy, batch, index, 1)
    except Exception as error:
        begun = time.monotonic()
        strategy.on_exception(error)
        still_open = dist.is_initialized()
        strategy.teardown()
        return f"{type(error).__name__}: {error}", time.monotonic() - begun, still_open
    return None
