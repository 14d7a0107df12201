"""Ranks that raise, are killed, leave or hang in the middle of a step: the job ends, and names them."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from packages.xla.tests.rank_fits import Net, begin, counts, fit, loader
from tests.ranks import in_ranks

from dstrat.errors import RankFailedError
from dstrat_xla import XLAStrategy


def fail():
    raise ValueError("on purpose")


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


def fall_asleep():
    time.sleep(600)


class Misbehaving(Net):
    """One rank does something in its third batch, with a step recorded that the device has not run."""

    def __init__(self, deed, rank=1):
        super().__init__()
        self.deed, self.rank = deed, rank

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        if batch_idx == 2 and self.global_rank == self.rank:
            self.deed()
        return loss


def launch(deed, rank=1):
    """Fit in two ranks, which are copies of the fork server, as it has not started XLA's runtime."""
    strategy = XLAStrategy(reduce_on_host=True, start_method="forkserver", timeout=timedelta(seconds=100))
    strategy.hang_timeout = timedelta(seconds=3)
    fit(strategy, Misbehaving(deed, rank), loader(6), devices=2)


@pytest.mark.parametrize(
    ("deed", "rank", "message"),
    [
        (fail, 1, "rank 1 of 2 failed: ValueError: on purpose"),
        (be_killed, 0, "rank 0 of 2 was killed by SIGKILL"),
        (be_killed, 1, "rank 1 of 2 was killed by SIGKILL"),
        (leave, 1, "rank 1 of 2 exited with code 0 before the others had ended"),
        (fall_asleep, 1, "rank 1 of 2 hung: no progress for 3 s, and rank 0 waited"),
    ],
)
def test_the_rank_that_misbehaves_is_named(deed, rank, message):
    with pytest.raises(RankFailedError, match=message) as caught:
        launch(deed, rank)
    assert caught.value.rank == rank
    if deed in {fail, fall_asleep}:
        assert f"in {deed.__name__}" in caught.value.rank_traceback


def until_it_breaks(cluster, deed):
    """Train in a rank that nobody supervises; return what broke, and whether it is still connected."""
    begin()
    strategy = XLAStrategy(reduce_on_host=True)
    try:
        fit(strategy, Misbehaving(deed), loader(6), devices=2, plugins=[cluster])
    except Exception as error:
        return f"{type(error).__name__}: {error}", dist.is_initialized()
    return None


def test_the_other_rank_of_one_that_dies_can_close():
    (message, is_open), gone = in_ranks(until_it_breaks, may_die=(1,), deed=be_killed)
    assert gone is None
    assert message.startswith(("RuntimeError", "DistBackendError"))
    assert not is_open


class BreaksAfterBackward(Net):
    """Raises when gradients are recorded, before the third step."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 2:
            self.compiled = counts()["compiled"]
            fail()


def test_closing_after_a_step_that_broke_compiles_nothing():
    net = BreaksAfterBackward()
    with pytest.raises(ValueError, match="on purpose"):
        fit("single_xla", net, loader(4))
    assert counts()["compiled"] == net.compiled
