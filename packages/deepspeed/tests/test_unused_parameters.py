"""Layers that some batches use and others do not: an unused one has a gradient of zero, in each stage."""

import pytest
import torch
from compiled import needs_compiled, use_compiled
from deepspeed_fit import Model, fit, loader, trainer_of
from torch import nn

from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)


class Skipping(Model):
    """Leaves one layer out of every first batch of two, another one out of every second."""

    uses_all = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.extra = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self.net.layers(inputs) + self.extra[batch_idx % 2](targets)
        loss = nn.functional.mse_loss(outputs, targets) + (outputs.square().mean() if batch_idx // 2 % 2 else 0)
        return loss + 0 * sum(layer(targets).sum() for layer in self.extra) if self.uses_all else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Decaying(Skipping):
    """What one device does where the gradient of a parameter is zero, and not None."""

    uses_all = True

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class DecayingAndSkipping(Decaying):
    uses_all = False


class ByItself(Skipping):
    """Steps after two batches, with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


WAYS = {
    "plain": (Skipping, Skipping, {}),
    "AdamW": (Decaying, DecayingAndSkipping, {}),
    "AdamW, accumulation": (Decaying, DecayingAndSkipping, {"accumulate_grad_batches": 2}),
    "manual optimization": (ByItself, ByItself, {}),
}
OFFLOADED = ("AdamW", "AdamW, accumulation")
QUICK = ("plain", "AdamW, accumulation", "manual optimization")


def each_way(cluster, stages, ways, **options):
    return {
        (stage, way): fit(
            WAYS[way][1](), DeepSpeedStrategy(stage=stage, **options), cluster, max_epochs=2, **WAYS[way][2]
        )
        for stage in stages
        for way in ways
    }


def on_one_device(way):
    whole, _, options = WAYS[way]
    return fit(whole(), "single_device", max_epochs=2, **options)


def test_losses_are_those_of_one_device_where_batches_leave_layers_out(ranks):
    expected = {way: on_one_device(way) for way in QUICK}
    for found in ranks(each_way, stages=STAGES, ways=QUICK):
        for (stage, way), losses in found.items():
            assert losses == pytest.approx(expected[way], rel=2e-6, abs=0), (stage, way)


class WithoutLoss(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx % 2 == 0 else None

    def on_train_end(self):
        self.trained = self.net.scale.detach().clone()


def trained(strategy, cluster=None):
    module = WithoutLoss()
    trainer_of(strategy, cluster, accumulate_grad_batches=2).fit(module, loader())
    return module.trained.tolist()


def trained_with(cluster, stages):
    return [trained(DeepSpeedStrategy(stage=stage), cluster) for stage in stages]


def test_a_step_applies_gradients_where_its_last_batch_has_no_loss(ranks):
    [found] = ranks(trained_with, 1, stages=STAGES[:3])
    for weights in found:
        assert weights == pytest.approx(trained("single_device"), rel=1e-6)


def each_way_on_the_cpu(cluster, stages, ways):
    use_compiled("cpu_adam")
    return each_way(cluster, stages, ways, offload_optimizer=True)


class TestWithWhatIsCompiled:
    pytestmark = needs_compiled("cpu_adam")

    @pytest.mark.slow
    def test_they_are_where_the_optimizer_is_on_the_cpu(self, ranks):
        expected = {way: on_one_device(way) for way in OFFLOADED}
        for found in ranks(each_way_on_the_cpu, stages=STAGES[1:], ways=OFFLOADED):
            for (stage, way), losses in found.items():
                assert losses == pytest.approx(expected[way], rel=1e-5, abs=0), (stage, way)
