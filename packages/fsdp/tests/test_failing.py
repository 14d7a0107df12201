"""What happens when a rank fails or is gone."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.failing_ranks import check_that_a_rank_that_dies_is_noticed, check_that_nobody_waits_for_a_rank_that_raises
from tests.hand_loop import BlockNet, batches, one_pass, parts, start
from tests.ranks import in_ranks
from torch import nn

from dstrat_fsdp import FSDPStrategy


def test_when_a_rank_raises_the_others_do_not_wait_for_it():
    check_that_nobody_waits_for_a_rank_that_raises(FSDPStrategy)


def test_when_a_rank_dies_the_others_notice_and_can_close():
    check_that_a_rank_that_dies_is_noticed(FSDPStrategy)


def test_teardown_before_setup_and_twice_is_harmless():
    strategy = FSDPStrategy()
    strategy.receive(parts())
    strategy.teardown()
    strategy.connect(nn.Linear(1, 1))
    strategy.on_exception(KeyboardInterrupt())
    strategy.teardown()
    strategy.teardown()
    assert strategy.model is strategy.module


class Hanging(BlockNet):
    """Rank 1 hangs until the other has told that it waits no longer."""

    told = None

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and dist.get_rank() == 1:
            deadline = time.monotonic() + 300
            while not Path(self.told).exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def until_it_times_out(cluster, device_mesh, told):
    strategy = FSDPStrategy(timeout=timedelta(seconds=2), device_mesh=device_mesh)
    module = Hanging()
    module.told = told
    start(strategy, module, parts(cluster))
    begun = time.monotonic()
    try:
        for index, batch in enumerate(batches(3)):
            one_pass(strategy, batch, index, 1)
    except Exception as error:
        waited = time.monotonic() - begun
        Path(told).touch()
        strategy.on_exception(error)
        return waited
    return None


@pytest.mark.parametrize("device_mesh", [None, (1, 2)])
def test_a_rank_that_hangs_is_waited_for_as_long_as_was_asked_on_every_mesh(device_mesh, tmp_path):
    waited, _ = in_ranks(until_it_times_out, device_mesh=device_mesh, told=str(tmp_path / "told"))
    assert 1.5 < waited < 60
