"""Strategies that override methods as programs for another trainer do."""

import pytest
import torch
from torch.utils.data import DataLoader

from dstrat import SingleDeviceStrategy, TrainModule
from dstrat.errors import MisuseError


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

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
            self.optimizers = list(trainer.configure_optimizers().optimizers)

    assert fit(quiet_trainer, Custom())
