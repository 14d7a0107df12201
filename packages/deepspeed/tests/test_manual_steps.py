"""Steps of manual optimization where there are no gradients, late ones, and gradients that ranks have not averaged."""

import pytest
import torch
from deepspeed_fit import Model, fit
from tests.ranks import each
from torch import nn

from dstrat import Callback
from dstrat.errors import MisuseError
from dstrat_deepspeed import DeepSpeedStrategy

SAVED_AFTER = 2


class Late(Model):
    """Applies gradients in the next batch, of which the first has none, and steps once more, where none are left.

    One layer has gradients, but no optimizer.
    """

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.untrained = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.optimizers().step()
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.untrained(self.net.layers(inputs)), targets)
        self.compute_gradients(loss)
        return loss.detach()

    def compute_gradients(self, loss):
        self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.02)


class Plain(Late):
    def compute_gradients(self, loss):
        loss.backward()


class Forgetful(Late):
    """Clears gradients before they are applied."""

    def compute_gradients(self, loss):
        super().compute_gradients(loss)
        self.optimizers().zero_grad()


class Saves(Callback):
    saves_checkpoints = True

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == SAVED_AFTER:
            trainer.save_checkpoint(self.path)


def whole_and_resumed(cluster, stage, path):
    """Return losses of a whole run, of one that goes on where gradients wait, and of one whose weights stay."""
    whole = fit(Late(), DeepSpeedStrategy(stage=stage), cluster, callbacks=[Saves(f"{path}/{stage}")])
    resumed = fit(Late(), DeepSpeedStrategy(stage=stage), cluster, ckpt_path=f"{path}/{stage}")
    return whole, resumed, fit(Forgetful(), DeepSpeedStrategy(stage=stage), cluster)


def test_a_step_without_gradients_changes_nothing_and_those_of_a_checkpoint_are_applied(ranks, tmp_path):
    late, forgetful = fit(Late(), "single_device"), fit(Forgetful(), "single_device")
    cases = {stage: {"stage": stage, "path": str(tmp_path)} for stage in range(4)}
    for found in ranks(each, function=whole_and_resumed, cases=cases):
        for stage, (whole, resumed, without) in found.items():
            assert whole == pytest.approx(late, rel=2e-6, abs=0), stage
            assert resumed == whole[SAVED_AFTER:], stage
            assert without == pytest.approx(forgetful, rel=2e-6, abs=0), stage


def plain_backward(cluster, stage):
    with pytest.raises(MisuseError) as raised:
        fit(Plain(), DeepSpeedStrategy(stage=stage), cluster)
    return str(raised.value)


def test_gradients_that_ranks_have_not_averaged_are_an_error(ranks):
    for found in ranks(each, function=plain_backward, cases={stage: {"stage": stage} for stage in (0, 2, 3)}):
        for said in found.values():
            assert "such as by loss.backward(), so that they are not averaged over the ranks: call self.manual" in said
