"""A module that computes gradients in a way of its own."""

import pytest
from deepspeed_fit import Model, fit

from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)


class Doubling(Model):
    """Its gradients are twice those of the loss."""

    calls = 0

    def backward(self, loss, *args, **kwargs):
        self.calls += 1
        (2 * loss).backward(*args, **kwargs)


class DoublingByItself(Doubling):
    """The same with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss / 2)
        optimizer.step()
        return loss.detach()


WAYS = {
    "automatic": (Doubling, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "manual": (DoublingByItself, {}),
}


def train(cluster=None, stage=None):
    strategy = "single_device" if cluster is None else DeepSpeedStrategy(stage=stage)
    found = {}
    for name, (kind, options) in WAYS.items():
        module = kind()
        found[name] = (fit(module, strategy, cluster, **options), module.calls)
        strategy = "single_device" if cluster is None else DeepSpeedStrategy(stage=stage)
    return found


def in_each_stage(cluster):
    return {stage: train(cluster, stage) for stage in STAGES}


def test_its_backward_is_called_in_every_stage_and_gives_what_one_device_gives(ranks):
    expected = train()
    for found in ranks(in_each_stage):
        for stage in STAGES:
            for name, (losses, calls) in expected.items():
                assert found[stage][name][0] == pytest.approx(losses, rel=1e-5, abs=0), (stage, name)
                assert found[stage][name][1] == calls > 0
