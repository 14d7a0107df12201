"""Steps of optimizers with parameters that a strategy has replaced."""

import copy
import pickle

import pytest
import torch
from tests.hand_loop import parts
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from dstrat import TrainModule
from dstrat.errors import MisuseError
from dstrat.parallel.optimizer_checks import FirstParameters, StepGuard
from dstrat.parallel.strategy import ParallelStrategy


def replace(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def test_parameters_that_something_holds_are_replaced_ones():
    net, first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), FirstParameters()
    weight = net[0].weight
    first.record(net)
    replace(net[0])
    replace(net[1])  # nothing else has held the first one
    first.record(net)
    replaced = first.take_replaced(net)
    assert {name: reference() for name, reference in replaced.items()} == {"0.weight": weight}
    assert not first.take_replaced(net)


def test_parameters_can_be_swapped_while_they_are_recorded():
    net, first = nn.Sequential(nn.Linear(2, 2)), FirstParameters()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    first.record(net)
    for parameter in net.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(torch.ones(parameter.shape)))  # fails with a weak reference
    assert not first.take_replaced(net)
    assert optimizer.param_groups[0]["params"] == list(net.parameters())


def test_a_replaced_parameter_that_nothing_has_any_more_is_not_held():
    net, first = nn.Sequential(nn.Linear(2, 2)), FirstParameters()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    first.record(net)
    del optimizer
    replace(net[0])
    assert not first.take_replaced(net)


def test_a_layer_that_has_left_the_module_is_not_replaced():
    net, first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), FirstParameters()
    kept, weight = net[1], net[1].weight
    first.record(net)
    net.pop(1)
    assert not first.take_replaced(net)
    assert kept.weight is weight
    assert kept.weight.requires_grad


def test_a_step_with_a_guarded_parameter_raises():
    guarded, free = nn.Linear(2, 2), nn.Linear(2, 2)
    guard = StepGuard(
        lambda: {f"guarded.{name}": parameter for name, parameter in guarded.named_parameters()}, "which is wrong"
    )
    try:
        optimizer = torch.optim.SGD(free.parameters(), lr=1.0)
        optimizer.step()
        optimizer.add_param_group({"params": list(guarded.parameters())})
        message = "the SGD steps 'guarded.weight' and 1 other parameters, which is wrong"
        with pytest.raises(MisuseError, match=message):
            optimizer.step()
        with pytest.raises(MisuseError, match=message):  # not once only
            optimizer.step()
        torch.optim.SGD(copy.deepcopy(guarded).parameters(), lr=1.0).step()
    finally:
        guard.remove()
    optimizer.step()


class Alone(ParallelStrategy):
    """A strategy of one process."""


def test_a_pickled_strategy_has_no_guards_of_the_run():
    strategy, layer = Alone(), nn.Linear(2, 2)
    strategy.receive(parts())
    strategy.refuse_steps(lambda: dict(layer.named_parameters()), "which is wrong")
    received = pickle.loads(pickle.dumps(strategy))
    received.teardown()  # it removes guards that the strategy has
    with pytest.raises(MisuseError, match="which is wrong"):
        torch.optim.SGD(layer.parameters(), lr=1.0).step()
    strategy.teardown()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


class Swapping(TrainModule):
    """Converts a layer by swapping its parameters, before a strategy sets it up."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def configure_model(self):
        for parameter in self.layer.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(torch.zeros(parameter.shape)))

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_swaps_its_parameters_before_its_setup_and_after_the_run():
    module = Swapping()
    quiet_trainer("ddp").fit(module, DataLoader(torch.ones(2, 4)))
    assert module.layer.bias.tolist() == pytest.approx([-0.2])
    torch.utils.swap_tensors(module.layer.bias, nn.Parameter(torch.ones(1)))
    assert module.layer.bias.item() == 1
