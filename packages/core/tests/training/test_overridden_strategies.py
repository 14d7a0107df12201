"""Strategies that override methods as programs for another trainer do."""

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch.utils.data import DataLoader

from dstrat import Launcher, OwnLoop, SingleDeviceStrategy, TrainModule, build
from dstrat.errors import MisuseError


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        return self.layer(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(quiet_trainer, strategy):
    module = Net()
    before = module.layer.weight.detach().clone()
    quiet_trainer(strategy=strategy, max_steps=2).fit(module, DataLoader(torch.ones(8, 2)))
    return not torch.equal(module.layer.weight, before)


def test_a_backward_that_wants_an_optimizer_is_refused_where_it_is_defined():
    with pytest.raises(MisuseError, match=r"define it as backward\(self, loss, \*args, \*\*kwargs\)") as caught:

        class Custom(SingleDeviceStrategy):
            def backward(self, closure_loss, optimizer, *args, **kwargs):
                super().backward(closure_loss, *args, **kwargs)

    assert str(caught.value).startswith("Custom.backward(self, closure_loss, optimizer, *args, **kwargs) cannot be")


def test_a_backward_that_can_be_called_without_the_optimizer_trains(quiet_trainer):
    class Custom(SingleDeviceStrategy):
        def backward(self, closure_loss, *args, **kwargs):
            super().backward(closure_loss, *args, **kwargs)

    assert fit(quiet_trainer, Custom())


def test_a_batch_to_device_with_a_device_and_an_index_trains(quiet_trainer):
    calls = []

    class Custom(SingleDeviceStrategy):
        def batch_to_device(self, batch, device=None, dataloader_idx=0):
            calls.append((device, dataloader_idx))
            return super().batch_to_device(batch, device, dataloader_idx)

    assert fit(quiet_trainer, Custom())
    assert calls


def test_a_setup_that_leaves_out_its_base_is_named(quiet_trainer):
    class Custom(SingleDeviceStrategy):
        def setup(self, trainer):
            self.accelerator.setup(self.root_device)

    with pytest.raises(MisuseError, match=r"Custom.setup did not call super\(\).setup\(trainer\)"):
        fit(quiet_trainer, Custom())


def test_a_setup_that_makes_the_optimizers_itself_trains(quiet_trainer):
    class Custom(SingleDeviceStrategy):
        def setup(self, trainer):
            self.model_to_device()
            self.optimizers = list(trainer.configure_optimizers().optimizers)

    assert fit(quiet_trainer, Custom())


def test_one_method_runs_every_step(quiet_trainer):
    calls = []

    class Custom(SingleDeviceStrategy):
        def run_step(self, name, step, /, *args, **kwargs):
            calls.append((name, step == getattr(self.module, name), len(args)))
            return super().run_step(name, step, *args, **kwargs)

    trainer, module, loader = quiet_trainer(strategy=Custom(), max_steps=2), Net(), DataLoader(torch.ones(8, 2))
    trainer.fit(module, loader, loader)
    trainer.test(module, loader)
    assert len(trainer.predict(module, loader)) == 8
    names = ("training_step", "validation_step", "test_step", "predict_step")
    assert set(calls) == {(name, True, 2) for name in names}
    assert [name for name, _, _ in calls].count("training_step") == 2


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_overridden_training_step_calls_its_base(quiet_trainer, precision):
    calls = []

    class Custom(SingleDeviceStrategy):
        def training_step(self, *args, **kwargs):
            calls.append(torch.is_autocast_enabled(self.root_device.type))
            return super().training_step(*args, **kwargs)

        def run_step(self, name, step, /, *args, **kwargs):
            calls.append(name)
            return super().run_step(name, step, *args, **kwargs)

    trainer = quiet_trainer(strategy=Custom(), max_steps=1, precision=precision)
    trainer.fit(Net(), DataLoader(torch.ones(8, 2)))
    assert calls == [False, "training_step"]


def test_an_overridden_training_step_calls_the_module_itself(quiet_trainer):
    class Custom(SingleDeviceStrategy):
        def training_step(self, *args, **kwargs):
            with self.precision_plugin.forward_context():
                return self.module.training_step(*args, **kwargs)

    assert fit(quiet_trainer, Custom())


class CountingLauncher(Launcher):
    launched = 0

    def launch(self, function, *args, **kwargs):
        self.launched += 1
        return function(*args, **kwargs)


def test_a_strategy_brings_its_own_launcher(quiet_trainer):
    launcher = CountingLauncher()

    class Custom(SingleDeviceStrategy):
        @property
        def launcher(self):
            return launcher

    assert fit(quiet_trainer, Custom())
    assert (
        OwnLoop(build(strategy=Custom(), accelerator=ACCELERATOR, devices=1)).launch(lambda loop: loop.world_size) == 1
    )
    assert launcher.launched == 2
