"""What happens when a rank fails or is gone."""

import os
import time

import torch.distributed as dist
from tests.hand_loop import Net, batches, one_pass, parts, start
from tests.ranks import in_ranks
from torch import nn

from dstrat_ddp import DDPStrategy


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and dist.get_rank() == 1:
            raise ValueError("rank 1 had enough")
        return super().training_step(batch, batch_idx)


class Dying(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3 and dist.get_rank() == 1:
            os._exit(3)
        return super().training_step(batch, batch_idx)


def until_it_breaks(cluster, module):
    """Return what broke and how long the rest took, from the exception until everything was closed."""
    strategy = DDPStrategy()
    start(strategy, globals()[module](), parts(cluster))
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


def test_when_a_rank_raises_the_others_do_not_wait_for_it():
    (other, *closed), (culprit, *also_closed) = in_ranks(until_it_breaks, module="Failing")
    assert culprit == "ValueError: rank 1 had enough"
    assert other.startswith(("RuntimeError", "DistBackendError"))
    for seconds, still_open in (closed, also_closed):
        assert seconds < 2
        assert not still_open


def test_when_a_rank_dies_the_others_notice_and_can_close():
    outcome, gone = in_ranks(until_it_breaks, module="Dying", may_die=(1,))
    message, seconds, still_open = outcome
    assert gone is None
    assert message.startswith(("RuntimeError", "DistBackendError"))
    assert seconds < 2
    assert not still_open


def reducer_after_an_exception(cluster):
    strategy = DDPStrategy()
    start(strategy, Net(), parts(cluster))
    kept_by_a_traceback = strategy.model
    had = hasattr(kept_by_a_traceback, "reducer")
    strategy.on_exception(ValueError())
    strategy.teardown()
    return had, hasattr(kept_by_a_traceback, "reducer")


def test_what_holds_the_process_group_goes_before_it():
    # Otherwise one rank in twenty hung for ever in torch, holding Python's lock, when its traceback was freed.
    assert in_ranks(reducer_after_an_exception) == [(True, False)] * 2


def test_teardown_before_setup_and_twice_is_harmless():
    strategy = DDPStrategy()
    strategy.receive(parts())
    strategy.teardown()
    strategy.connect(nn.Linear(1, 1))
    strategy.on_exception(KeyboardInterrupt())
    strategy.teardown()
    strategy.teardown()
    assert strategy.model is strategy.module
