"""What one epoch, evaluation or run leaves behind for the next."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dstrat import Callback, SingleDeviceStrategy
from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import MisuseError


def _unchanged(batch):
    return batch


def test_gradients_of_a_group_that_an_epoch_broke_off_are_not_in_the_next_step(quiet_trainer, make_line, loader):
    class Breaking(type(make_line())):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

        def on_before_optimizer_step(self, optimizer):
            self.gradients = [*getattr(self, "gradients", []), self.layer.weight.grad.clone()]

    module = make_line(Breaking, lr=0.0)
    quiet_trainer(max_epochs=2, accumulate_grad_batches=2).fit(module, loader())
    first, second = module.gradients
    assert torch.equal(first, second)


def test_a_validation_that_breaks_leaves_the_module_in_training_mode(quiet_trainer, make_line, loader):
    class Failing(type(make_line())):
        def validation_step(self, batch, batch_idx):
            raise ValueError("on purpose")

    module = make_line(Failing)
    with pytest.raises(ValueError, match="on purpose"):
        quiet_trainer(max_epochs=1).fit(module, loader(), loader())
    assert module.training
    assert module.layer.training


def test_a_run_within_a_run_is_an_error(quiet_trainer, make_line, loader):
    class Nested(type(make_line())):
        def on_train_epoch_end(self):
            self.trainer.validate(self, loader())

    with pytest.raises(MisuseError, match="in the middle of its fit, and validate was called"):
        quiet_trainer(max_epochs=1).fit(make_line(Nested), loader())


def test_a_lower_limit_ends_the_epoch_that_is_continued(quiet_trainer, make_line, loader, tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    quiet_trainer(max_epochs=1, callbacks=Saving()).fit(make_line(), loader())
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=2)
    trainer.fit(make_line(), loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert trainer.global_step == 4


@pytest.mark.parametrize("batch", [None, np.ones(2)], ids=["None", "an array"])
def test_a_profiler_lets_every_kind_of_batch_pass(quiet_trainer, make_line, loader, batch):
    class Counting(type(make_line())):
        count = 0

        def validation_step(self, batch, batch_idx):
            self.count += 1

    module = make_line(Counting)
    batches = DataLoader([batch, batch], batch_size=None, collate_fn=_unchanged)
    quiet_trainer(profiler="simple").validate(module, batches)
    assert module.count == 2


def test_a_second_interrupt_while_a_run_is_cleaned_up_leaves_the_trainer_usable(quiet_trainer, make_line, loader):
    class Impatient(type(make_line())):
        is_patient = False

        def teardown(self, stage):
            if not self.is_patient:
                raise KeyboardInterrupt

    module = make_line(Impatient)
    trainer = quiet_trainer(max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.validate(module, loader())
    module.is_patient = True
    assert trainer.validate(module, loader())


def test_a_loss_scale_is_undone_where_the_module_steps_by_itself(quiet_trainer, make_line, line_class, loader):
    class Stepping(line_class):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            assert isinstance(optimizer, torch.optim.SGD)
            optimizer.step(closure=optimizer_closure)

    class Halving(TruePrecision):
        def optimizer_step(self, optimizer, closure, **kwargs):
            loss = closure()
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad /= 2
            optimizer.step(**kwargs)
            return loss

    own, plain = make_line(Stepping), make_line()
    for module in (own, plain):
        quiet_trainer(plugins=Halving("32-true"), max_epochs=1).fit(module, loader())
    assert torch.equal(own.layer.weight, plain.layer.weight)


class Replacing(SingleDeviceStrategy):
    """Gives the module other parameters in the end, as where those of the device are of another kind."""

    def teardown(self):
        super().teardown()
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False):
                replaced = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                setattr(module, name, replaced)


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, Replacing])
def test_a_toggled_optimizer_of_a_step_that_raised_is_forgotten(quiet_trainer, line_class, loader, strategy):
    class Toggling(line_class):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            self.toggle_optimizer(self.optimizers()[0])
            raise ValueError("enough")

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.other)]

    module = Toggling()
    for _ in range(2):
        with pytest.raises(ValueError, match="enough"):
            quiet_trainer(strategy=strategy()).fit(module, loader())
    assert all(parameter.requires_grad for parameter in module.parameters())
