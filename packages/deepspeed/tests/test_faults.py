"""Stage 3 that fails anywhere: the other ranks notice, and the next run in the same interpreter is not harmed."""

import pytest
from deepspeed_fit import Model, fit
from deepspeed_loop import Net, parts, start
from torch import distributed, nn

from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.user_module import ModuleSnapshot

POINTS = ("configure_model", "configure_optimizers", "forward", "backward", "step")
KEPT = []  # an exception that is being shown keeps all frames of its traceback


class Faulty(Model):
    """Raises in one place, on one rank or on all; half of its layers are made when they are sharded."""

    point = rank = None

    def __init__(self):
        super().__init__()
        self.extra = None

    def fail_in(self, point):
        if self.point == point and self.rank in (None, self.global_rank):
            raise ValueError(f"{point}, on purpose")

    def configure_model(self):
        if self.extra is None:
            made = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
            self.fail_in("configure_model")
            self.extra = made.linear1

    def configure_optimizers(self):
        self.fail_in("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = super().training_step((inputs + 0 * self.extra(inputs).sum(), targets), batch_idx)
        if batch_idx == 1:
            self.fail_in("forward")
            loss.register_hook(lambda _: self.fail_in("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.fail_in("step")


def fail(cluster, point, rank=None):
    """Fit until it breaks; return what broke."""
    module = Faulty()
    module.point, module.rank = point, rank
    try:
        fit(module, DeepSpeedStrategy(stage=3), cluster)
    except (ValueError, RuntimeError) as error:
        KEPT.append(error)
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("point", ["configure_model", "configure_optimizers"])
def test_the_others_notice_that_one_raises_before_there_is_an_engine(ranks, point):
    other, culprit = ranks(fail, point=point, rank=1)
    assert culprit == f"ValueError: {point}, on purpose"
    assert other.startswith(("RuntimeError", "DistBackendError"))


def fail_and_fit(cluster):
    return {point: (fail(cluster, point), fit(Faulty(), DeepSpeedStrategy(stage=3), cluster)) for point in POINTS}


def test_a_fit_after_one_that_failed_gives_the_losses_of_one_device(ranks):
    expected = fit(Faulty(), "single_device")
    for found in ranks(fail_and_fit):
        for point, (said, losses) in found.items():
            assert said == f"ValueError: {point}, on purpose"
            assert losses == pytest.approx(expected, rel=1e-5, abs=0), point


def fail_to_clean_up(cluster, step):
    """Let a run fail, and then one step of what cleans up after it; return what is left."""

    def fails(*_, **__):
        raise RuntimeError(f"{step}, on purpose")

    strategy, linear = DeepSpeedStrategy(stage=3), nn.functional.linear
    start(strategy, module := Net(), parts(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleSnapshot if step == "gather" else strategy.engine, step, fails)
        with pytest.raises(RuntimeError, match=f"{step}, on purpose"):
            strategy.on_exception(ValueError("of the run"))
        left = {
            "group": distributed.is_initialized(),
            "marks": any(hasattr(parameter, "ds_id") for parameter in module.parameters()),
            "linear": nn.functional.linear is not linear,
        }
        strategy.teardown()
    return left


@pytest.mark.parametrize("step", ["gather", "destroy"])
def test_cleaning_up_that_fails_does_the_rest_and_teardown_begins_no_collective(ranks, step):
    assert ranks(fail_to_clean_up, 1, step=step) == [dict.fromkeys(("group", "marks", "linear"), False)]
