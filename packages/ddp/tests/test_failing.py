"""What happens when a rank fails or is gone."""

import sys

import pytest
from tests.failing_ranks import check_that_a_rank_that_dies_is_noticed, check_that_nobody_waits_for_a_rank_that_raises
from tests.hand_loop import Net, parts, start
from tests.ranks import in_ranks
from tests.warm_program import WarmProgram
from torch import nn

from dstrat_ddp import DDPStrategy


def test_when_a_rank_raises_the_others_do_not_wait_for_it():
    check_that_nobody_waits_for_a_rank_that_raises(DDPStrategy)


def test_when_a_rank_dies_the_others_notice_and_can_close():
    check_that_a_rank_that_dies_is_noticed(DDPStrategy)


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


LEAVING = """
import os, sys
import dstrat

def work(loop, leaves):
    if loop.strategy.global_rank == leaves:
        os._exit(0)
    loop.strategy.barrier()

dstrat.OwnLoop(dstrat.build(strategy="ddp", accelerator="cpu")).launch(work, int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the note is in the log, without a handler here")
def test_rank_that_leaves_with_success_under_torchrun_is_named(tmp_path):
    (tmp_path / "leaving.py").write_text(LEAVING)
    (tmp_path / "torchrun.py").write_text("from torch.distributed.run import main\nmain()\n")
    arguments = ["--standalone", "--nproc-per-node=2", str(tmp_path / "leaving.py"), "0"]
    torchrun = WarmProgram(tmp_path / "torchrun.py", *arguments)
    _, errors = torchrun.communicate()
    assert torchrun.returncode == 1
    assert "rank 0 of 2 has ended already" in errors.partition("Root Cause")[2]
