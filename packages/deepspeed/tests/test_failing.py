"""A rank that raises lets go of what others wait for."""

import pytest
from deepspeed_loop import Net, parts, start, train

from dstrat_deepspeed import DeepSpeedStrategy

KEPT = []  # an exception that is being shown keeps all frames of its traceback


class Failing(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.fails:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)


def fail(cluster, stage):
    module = Failing()
    module.fails = cluster.global_rank == 1
    strategy = DeepSpeedStrategy(stage=stage)
    start(strategy, module, parts(cluster))
    try:
        train(strategy, steps=4)
    except (ValueError, RuntimeError) as error:
        KEPT.append(error)
        strategy.on_exception(error)
        strategy.teardown()
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_other_ranks_of_one_that_raises_do_not_wait_for_the_timeout(ranks, stage):
    other, first = ranks(fail, stage=stage)
    assert first == "ValueError: on purpose"
    assert other.startswith(("RuntimeError", "DistBackendError"))
