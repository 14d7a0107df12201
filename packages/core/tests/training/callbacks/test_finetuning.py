from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from dstrat import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint, TrainModule
from dstrat.errors import MisuseError


class Tuned(TrainModule):
    """A backbone with a norm, and a head."""

    def __init__(self, lr=0.1, schedules=False):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        self.lr, self.schedules = lr, schedules

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)
        if not self.schedules:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Record(Callback):
    """Keeps learning rates and weights of each epoch."""

    def __init__(self):
        self.rates, self.weights = [], []

    def on_train_epoch_end(self, trainer, module):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.weights.append(module.backbone[0].weight.detach().clone())


class Unfreeze(BaseFinetuning):
    """Unfreezes the first layer in epoch 1, and keeps norms in evaluation."""

    def freeze_before_training(self, module):
        self.freeze(module.backbone, train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone[0], optimizer)


class StoppedError(Exception):
    pass


class Stop(Callback):
    def __init__(self, batches):
        self.batches = batches

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen == self.batches:
            raise StoppedError


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_the_backbone_is_frozen_until_its_epoch(fit):
    record, module = Record(), Tuned()
    first = module.backbone[0].weight.detach().clone()
    fit([BackboneFinetuning(unfreeze_backbone_at_epoch=2), record], module=module, validates=False, max_epochs=4)
    assert torch.equal(record.weights[0], first)
    assert torch.equal(record.weights[1], first)
    assert not torch.equal(record.weights[2], first)


def test_the_backbones_rate_doubles_until_it_is_the_heads(fit):
    record = Record()
    fit([BackboneFinetuning(unfreeze_backbone_at_epoch=1), record], module=Tuned(0.1), validates=False, max_epochs=7)
    rates = [group[1] for group in record.rates[1:]]
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.1, 0.1])
    assert [len(rates) for rates in record.rates] == [1, 2, 2, 2, 2, 2, 2]


def test_without_alignment_the_backbones_rate_goes_beyond_the_heads(fit):
    record = Record()
    callback = BackboneFinetuning(
        unfreeze_backbone_at_epoch=0, backbone_initial_lr=0.06, lambda_func=lambda epoch: 3.0, should_align=False
    )
    fit([callback, record], module=Tuned(0.1), validates=False, max_epochs=3)
    assert [rates[-1] for rates in record.rates] == pytest.approx([0.06, 0.18, 0.54])


def test_norms_of_a_frozen_backbone_are_trained_unless_told_otherwise(fit):
    module, frozen = Tuned(), Tuned()
    fit([BackboneFinetuning()], module=module, validates=False)
    assert not torch.equal(module.backbone[1].weight, torch.ones(8))
    fit([Unfreeze()], module=frozen, validates=False, max_epochs=1)
    assert torch.equal(frozen.backbone[1].weight, torch.ones(8))
    assert torch.equal(frozen.backbone[1].running_mean, torch.zeros(8))


def test_a_group_gets_a_tenth_of_the_first_ones_rate(fit):
    record, module = Record(), Tuned(0.5)
    fit([Unfreeze(), record], module=module, validates=False, max_epochs=2)
    assert record.rates[1] == [0.5, 0.05]


@pytest.mark.parametrize("schedules", [False, True])
@pytest.mark.parametrize(  # epochs have two, and layers are unfrozen in the second
    "batches", [3, 4, 5, pytest.param(6, marks=pytest.mark.variant), pytest.param(8, marks=pytest.mark.variant)]
)
@pytest.mark.parametrize("make", [Unfreeze, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
def test_a_resumed_run_unfreezes_as_one_that_never_stopped(fit, tmp_path, make, batches, schedules):
    whole, record = Tuned(schedules=schedules), Record()
    fit([make(), record], module=whole, validates=False, max_epochs=6)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=batches)
    with pytest.raises(StoppedError):
        fit([make(), Stop(batches + 1), saving], module=Tuned(schedules=schedules), validates=False, max_epochs=6)
    resumed, again = Tuned(schedules=schedules), Record()
    fit([make(), again], module=resumed, validates=False, max_epochs=6, ckpt_path=saving.best_model_path)
    assert again.rates == record.rates[-len(again.rates) :]
    expected = weights(whole)
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in whole.parameters()]


def test_parameters_that_an_optimizer_has_already_stay_in_their_group(fit, caplog):
    class All(Tuned):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    record = Record()
    with caplog.at_level(logging.WARNING):
        fit([Unfreeze(), record], module=All(), validates=False, max_epochs=2)
    assert record.rates == [[0.1], [0.1]]
    assert "2 of 2 parameters to unfreeze are in the SGD already" in caplog.text


def test_a_module_without_a_backbone_is_told_to_have_one(fit, make_line):
    with pytest.raises(MisuseError, match=r"Line\.backbone, and there is no module of that name"):
        fit([BackboneFinetuning()], module=make_line())


def test_the_methods_to_implement_are_named(fit):
    with pytest.raises(MisuseError, match="BaseFinetuning must implement freeze_before_training"):
        fit([BaseFinetuning()], module=Tuned(), validates=False)


def test_modules_are_flattened_to_those_with_parameters_or_without_children():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)

    scaled, relu = Scaled(), nn.ReLU()
    assert BaseFinetuning.flatten_modules([nn.Sequential(scaled), [relu]]) == [scaled, scaled.inner, relu]
    assert list(BaseFinetuning.filter_params(scaled)) == list(scaled.parameters())


def test_norms_that_are_trained_from_the_start_are_no_reason_for_a_warning(fit, caplog):
    fit([BackboneFinetuning(unfreeze_backbone_at_epoch=1)], module=Tuned(), validates=False, max_epochs=2)
    assert "already" not in caplog.text
