from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from dstrat import BackboneFinetuning, BaseFinetuning, Callback, ModelCheckpoint, Muon, TrainModule
from dstrat.errors import MisuseError


class Tuned(TrainModule):
    """A backbone with a norm, and a head."""

    def __init__(self, lr=0.1, schedule=None):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)
        self.lr, self.schedule = lr, schedule

    def training_step(self, batch, batch_idx):
        loss = self.head(self.backbone(batch[0])).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=self.lr)
        return optimizer if self.schedule is None else ([optimizer], [self.schedule(optimizer)])


class Warmup:
    """A function with state, which checkpoints have."""

    def __init__(self):
        self.calls = 0

    def __call__(self, epoch):
        self.calls += 1
        return min(1.0, (epoch + 1) / 4)


def chain(optimizer):
    return schedulers.ChainedScheduler(
        [schedulers.LambdaLR(optimizer, Warmup()), schedulers.ExponentialLR(optimizer, 0.9)]
    )


def sequence(optimizer):
    cosine = schedulers.CosineAnnealingWarmRestarts(optimizer, 2)
    return schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer, 0.1, total_iters=3), cosine], [3])


def with_loss(optimizer):
    scheduler = schedulers.ReduceLROnPlateau(optimizer, mode="max", patience=0, min_lr=[0.0])
    return {"scheduler": scheduler, "monitor": "loss"}


SCHEDULES = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 1, gamma=0.5),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, Warmup()),
    "lambda_from_zero": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: max(epoch - 1, 0) / 4),
    "multiplicative": lambda optimizer: schedulers.MultiplicativeLR(optimizer, lambda epoch: 0.9),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 2),
    "one_cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=12),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "averaging": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=3),
    "plateau": with_loss,
    "chain": chain,
    "sequence": sequence,
}


class TunedByMuon(Tuned):
    def configure_optimizers(self):
        return Muon.of_module(self, lr=self.lr)


class Record(Callback):
    """Keeps learning rates and weights of each epoch."""

    def __init__(self):
        self.rates, self.weights = [], []

    def on_train_epoch_end(self, trainer, module):
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.weights.append(module.backbone[0].weight.detach().cpu().clone())


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


def constant(optimizer):
    return {"scheduler": schedulers.LambdaLR(optimizer, lambda step: 1.0), "interval": "step"}


@pytest.mark.parametrize("schedule", [None, constant])
def test_the_backbones_rate_doubles_until_it_is_the_heads(fit, schedule):
    record, module = Record(), Tuned(0.1, schedule)
    fit([BackboneFinetuning(unfreeze_backbone_at_epoch=1), record], module=module, validates=False, max_epochs=7)
    rates = [group[1] for group in record.rates[1:]]
    assert rates == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.1, 0.1])
    assert [len(rates) for rates in record.rates] == [1, 2, 2, 2, 2, 2, 2]


def test_both_groups_that_muon_makes_of_a_backbone_get_its_rate(fit):
    record, module = Record(), TunedByMuon(0.1)
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False)
    fit([callback, record], module=module, validates=False, max_epochs=3)
    matrices, of_adamw, *added = record.rates[-1]
    assert (matrices, of_adamw) == (0.1, 1e-3)
    assert added == pytest.approx([0.02, 0.02])


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_group_follows_the_schedule_of_the_first_one(fit, schedule):
    record, module = Record(), Tuned(0.1, SCHEDULES[schedule])
    fit([Unfreeze(), record], module=module, validates=False, max_epochs=6)
    heads, added = zip(*record.rates[1:], strict=True)
    assert added == pytest.approx([rate / 10 for rate in heads])
    assert len(set(heads)) > 1


@pytest.mark.parametrize("schedule", [None, "step"])
@pytest.mark.parametrize(  # epochs have two, and layers are unfrozen in the second
    "batches", [3, 4, 5, pytest.param(6, marks=pytest.mark.variant), pytest.param(8, marks=pytest.mark.variant)]
)
@pytest.mark.parametrize("make", [Unfreeze, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
def test_a_resumed_run_unfreezes_as_one_that_never_stopped(fit, tmp_path, make, batches, schedule):
    check_resume(fit, tmp_path, make, batches, make_module=lambda: Tuned(schedule=SCHEDULES.get(schedule)))


@pytest.mark.parametrize("schedule", ["one_cycle", "plateau", "chain", "sequence"])
def test_a_resumed_run_schedules_the_groups_that_were_added(fit, tmp_path, schedule):
    make = functools.partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1)
    check_resume(fit, tmp_path, make, 5, make_module=lambda: Tuned(schedule=SCHEDULES[schedule]))


@pytest.mark.parametrize("make", [Unfreeze, lambda: BackboneFinetuning(unfreeze_backbone_at_epoch=1)])
def test_a_resumed_run_of_muon_unfreezes_as_one_that_never_stopped(fit, tmp_path, make):
    check_resume(fit, tmp_path, make, 5, make_module=TunedByMuon)


class Compiled(Tuned):
    def __init__(self):
        super().__init__()
        self.backbone[0] = torch.compile(self.backbone[0], backend="eager")
        self.backbone[1] = torch.compile(self.backbone[1], backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor")  # by Dynamo
@pytest.mark.parametrize(("make_module", "make_resumed"), [(Compiled, Tuned), (Tuned, Compiled)])
def test_a_resumed_run_unfreezes_layers_that_only_one_of_them_compiles(fit, tmp_path, make_module, make_resumed):
    check_resume(fit, tmp_path, Unfreeze, 4, make_module=make_module, make_resumed=make_resumed)


def check_resume(fit, tmp_path, make, batches, *, make_module, make_resumed=None):
    whole, record = make_module(), Record()
    fit([make(), record], module=whole, validates=False, max_epochs=6)
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=batches)
    with pytest.raises(StoppedError):
        fit([make(), Stop(batches + 1), saving], module=make_module(), validates=False, max_epochs=6)
    resumed, again = (make_resumed or make_module)(), Record()
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
