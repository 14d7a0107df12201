"""Modules that compute gradients and step their optimizers by themselves."""

from __future__ import annotations

import pytest
import torch
from tests.sharpness import Sam
from torch import nn

from dstrat import Callback, Logger, TrainModule
from dstrat.errors import ConflictError, MisuseError


class ByHand(TrainModule):
    """Fits a sum of eight numbers, as the automatic module of conftest does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.automatic_optimization = False

    def loss(self, batch):
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class OwnOptimizer(ByHand):
    """Steps an optimizer that the Trainer does not know."""

    def __init__(self):
        super().__init__()
        self.own = torch.optim.SGD(self.layer.parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.own.zero_grad()
        loss.backward()
        self.own.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        return None


class StepsTorch(OwnOptimizer):
    """Steps the torch optimizer below the one of ``self.optimizers()``."""

    def configure_optimizers(self):
        return self.own


class TwoLayers(ByHand):
    """Has an optimizer for each of two layers, as a GAN does."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(8, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        for optimizer, layer in zip(self.optimizers(), (self.layer, self.second), strict=True):
            with optimizer.toggle_model():
                other = self.second if layer is self.layer else self.layer
                self.seen.append((layer.weight.requires_grad, other.weight.requires_grad))
                loss = nn.functional.mse_loss(self.layer(batch[0]) + self.second(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (self.layer, self.second)]


def test_it_trains_as_automatic_optimization_does(quiet_trainer, make_line, line, loader):
    module = make_line(ByHand)
    trainer = quiet_trainer()
    trainer.fit(module, loader())
    quiet_trainer().fit(line, loader())
    assert torch.equal(module.layer.weight, line.layer.weight)
    assert trainer.global_step == 12


@pytest.mark.parametrize("cls", [OwnOptimizer, StepsTorch])
def test_an_optimizer_that_was_made_before_the_run_trains(quiet_trainer, make_line, line, loader, cls):
    module = make_line(cls)
    quiet_trainer().fit(module, loader())
    quiet_trainer().fit(line, loader())
    assert torch.equal(module.layer.weight, line.layer.weight)


def test_it_trains_the_same_on_two_ranks(quiet_trainer, make_line, loader, averaging):
    one, two = make_line(ByHand), make_line(ByHand)
    quiet_trainer(strategy=averaging(), devices=2).fit(two, loader(4))  # first, as its ranks are forked
    quiet_trainer().fit(one, loader(8))
    torch.testing.assert_close(two.layer.weight, one.layer.weight)


def test_each_optimizer_counts_its_steps_at_once(quiet_trainer, make_line, loader):
    counted = []

    class Counting(TwoLayers):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            counted.append(self.global_step)

    trainer = quiet_trainer(max_epochs=1, limit_train_batches=3)
    trainer.fit(make_line(Counting), loader())
    assert counted == [2, 4, 6]


def test_training_ends_at_max_steps_also_when_a_batch_takes_several(quiet_trainer, make_line, loader):
    trainer = quiet_trainer(max_epochs=-1, max_steps=5)
    trainer.fit(make_line(TwoLayers), loader())
    assert trainer.global_step == 6


def test_a_toggled_optimizer_is_the_only_one_whose_parameters_require_gradients(quiet_trainer, make_line, loader):
    module = make_line(TwoLayers)
    quiet_trainer(max_epochs=1, limit_train_batches=1).fit(module, loader())
    assert module.seen == [(True, False), (True, False)]
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_toggling_a_second_time_is_an_error(quiet_trainer, make_line, loader):
    class Twice(TwoLayers):
        def training_step(self, batch, batch_idx):
            one, two = self.optimizers()
            self.toggle_optimizer(one)
            self.toggle_optimizer(two)

    with pytest.raises(MisuseError, match="toggled already: call untoggle_optimizer"):
        quiet_trainer().fit(make_line(Twice), loader())


def test_the_hooks_of_a_step_are_called(quiet_trainer, make_line, loader):
    calls = []

    class Noting(Callback):
        def on_before_backward(self, trainer, module, loss):
            calls.append("before_backward")

        def on_after_backward(self, trainer, module):
            calls.append("after_backward")

        def on_before_optimizer_step(self, trainer, module, optimizer):
            calls.append(type(optimizer).__name__)

    quiet_trainer(max_epochs=1, limit_train_batches=1, callbacks=Noting()).fit(make_line(ByHand), loader())
    assert calls == ["before_backward", "after_backward", "SGD"]


def test_an_optimizer_that_needs_a_closure_gets_it(quiet_trainer, make_line, loader):
    class Lbfgs(ByHand):
        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()

            def closure():
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            return {"before": self.loss(batch).detach(), "after": optimizer.step(closure)}

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    module = make_line(Lbfgs)
    start = module.layer.weight.clone()
    quiet_trainer(max_epochs=1, limit_train_batches=2).fit(module, loader())
    assert not torch.equal(module.layer.weight, start)


@pytest.mark.parametrize("kind", [Sam, torch.optim.LBFGS])
def test_an_optimizer_that_needs_another_gradient_gets_no_step_without_a_closure(
    quiet_trainer, make_line, loader, kind
):
    class Climbing(ByHand):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.loss(batch))
            self.optimizers().step()

        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.1)

    message = r"(Sam computes another loss|LBFGS computes its loss) .*: pass its step a closure"
    with pytest.raises(MisuseError, match=message):
        quiet_trainer(max_epochs=1).fit(make_line(Climbing), loader())


def test_the_loss_scale_is_undone_before_the_hooks_look(quiet_trainer, make_line, loader):
    class Seeing(ByHand):
        def on_before_optimizer_step(self, optimizer):
            self.largest = self.layer.weight.grad.abs().max().item()

    scaled, plain = make_line(Seeing), make_line(Seeing)
    quiet_trainer(max_epochs=1, limit_train_batches=1, plugins=_Scaling()).fit(scaled, loader())
    quiet_trainer(max_epochs=1, limit_train_batches=1).fit(plain, loader())
    assert scaled.largest == pytest.approx(plain.largest)


def test_schedulers_are_the_modules_business(quiet_trainer, make_line, loader):
    class Scheduled(ByHand):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def on_train_epoch_end(self):
            self.rate = self.optimizers().param_groups[0]["lr"]
            self.lr_schedulers().step()

    module = make_line(Scheduled)
    quiet_trainer(max_epochs=3).fit(module, loader())
    assert module.rate == pytest.approx(0.05 * 0.1**2)


def test_gradients_stay_local_without_synchronisation(quiet_trainer, make_line, loader, averaging):
    class Accumulating(ByHand):
        def training_step(self, batch, batch_idx):
            if batch_idx % 2 == 0:
                self.optimizers().zero_grad()
            with self.no_backward_sync(enabled=batch_idx % 2 == 0):
                self.manual_backward(self.loss(batch) / 2)
            if batch_idx % 2 == 1:
                self.optimizers().step()

    one, two = make_line(Accumulating), make_line(Accumulating)
    quiet_trainer(strategy=averaging(), devices=2).fit(two, loader(4))  # first, as its ranks are forked
    quiet_trainer().fit(one, loader(8))
    torch.testing.assert_close(two.layer.weight, one.layer.weight)


@pytest.mark.parametrize(
    ("option", "advice"),
    [({"gradient_clip_val": 1.0}, "self.clip_gradients"), ({"accumulate_grad_batches": 4}, "every n-th batch")],
)
def test_arguments_of_automatic_optimization_are_an_error(quiet_trainer, make_line, loader, option, advice):
    (name,) = option
    with pytest.raises(ConflictError, match=f"{name}=.* is for automatic optimization.*{advice}"):
        quiet_trainer(**option).fit(make_line(ByHand), loader())


def test_manual_backward_in_automatic_optimization_is_an_error(quiet_trainer, make_line, loader):
    class Mixed(ByHand):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(MisuseError, match=r"Mixed is optimized automatically: set self.automatic_optimization = False"):
        quiet_trainer().fit(make_line(Mixed), loader())


def test_several_optimizers_in_automatic_optimization_are_an_error(quiet_trainer, make_line, loader):
    class Automatic(TwoLayers):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    with pytest.raises(MisuseError, match=r"2 optimizers.*automatic_optimization = False"):
        quiet_trainer().fit(make_line(Automatic), loader())


def test_a_scheduler_that_watches_a_value_is_stepped_by_the_module(quiet_trainer, make_line, loader, caplog):
    class Watching(ByHand):
        given = ()

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **dict(self.given)}}

        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step(1.0)
            self.rate = self.optimizers().param_groups[0]["lr"]

    module = make_line(Watching)
    quiet_trainer(max_epochs=1).fit(module, loader(16))
    assert (module.rate, caplog.messages) == (0.05 / 4, [])
    module = make_line(Watching)
    module.given = {"monitor": "x", "interval": "step"}
    quiet_trainer(max_epochs=1).fit(module, loader(16))
    assert module.rate == 0.05 / 4
    assert caplog.messages == [
        (
            "interval='step', monitor='x' of ReduceLROnPlateau is ignored, as Watching has "
            "automatic_optimization=False: call self.lr_schedulers().step() in it"
        )
    ]


def test_an_optimizer_is_toggled_for_a_block(quiet_trainer, make_line, loader):
    class Toggling(TwoLayers):
        def training_step(self, batch, batch_idx):
            first, _ = self.optimizers()
            with self.toggled_optimizer(first):
                self.seen.append((self.layer.weight.requires_grad, self.second.weight.requires_grad))
                self.manual_backward(self.loss(batch))
                self.clip_gradients(first, 0.1)
                first.step()
            assert self.second.weight.requires_grad

    module = make_line(Toggling)
    quiet_trainer(max_epochs=1).fit(module, loader(24))
    assert module.seen == [(True, False)] * 2


def _Scaling():  # noqa: N802 - stands for a class
    from dstrat.builtin.precision.true import TruePrecision

    class Scaling(TruePrecision):
        def scale_loss(self, loss):
            return loss * 1024

        def unscale_gradients(self, optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad /= 1024

    return Scaling("32-true")


class ComputesTwice(ByHand):
    """Computes without gradients, and after its step again, as the two parts of a GAN do."""

    def __init__(self):
        super().__init__()
        self.differences = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with torch.no_grad():
            self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        assert self.layer.weight.grad is not None
        optimizer.step()
        weight = self.layer.weight.detach().bfloat16()
        output = self.layer(batch[0])
        expected = nn.functional.linear(batch[0].bfloat16(), weight, self.layer.bias.detach().bfloat16())
        self.differences.append((output - expected).abs().max().item())


def test_mixed_precision_computes_with_the_weights_of_the_last_step(quiet_trainer, loader):
    module = ComputesTwice()
    quiet_trainer(precision="bf16-mixed").fit(module, loader())
    assert module.differences
    assert max(module.differences) == 0


class Steps(Logger):
    """Notes the steps of the rows with a name."""

    name, version = "steps", 0

    def __init__(self):
        self.steps = []

    def log_metrics(self, metrics, step=None):
        if "loss" in metrics:
            self.steps.append(step)

    def log_hyperparams(self, *_args, **_options): ...


def test_values_are_logged_by_batches_where_the_module_has_its_own_optimizer(quiet_trainer, make_line, loader, caplog):
    logger = Steps()
    options = {"logger": logger, "log_every_n_steps": 2, "max_epochs": 2, "limit_train_batches": 3}
    quiet_trainer(**options).fit(make_line(OwnOptimizer), loader())
    assert logger.steps == [2, 4, 6]
    (message,) = caplog.messages
    assert message.startswith("configure_optimizers of OwnOptimizer returned no optimizer, so that global_step stays 0")


@pytest.mark.parametrize("logger", [Steps(), False], ids=["logger", "no logger"])
def test_an_epoch_without_a_step_of_the_trainers_optimizers_is_logged(logger, quiet_trainer, make_line, loader, caplog):
    options = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2, "max_steps": 4, "limit_train_batches": 3}
    quiet_trainer(**options).fit(make_line(StepsTorch), loader())
    assert not logger or logger.steps == []
    assert caplog.messages[0].startswith("no optimizer of self.optimizers() has stepped in epoch 0 of StepsTorch")
