"""Steps of optimizers with parameters that a strategy has replaced."""

import copy

import pytest
import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.parallel.optimizer_checks import FirstParameters, StepGuard


def replace(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def test_parameters_that_something_holds_are_replaced_ones():
    net, first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), FirstParameters()
    first.record(net)
    weight = net[0].weight
    first.hold(net)
    torch.utils.swap_tensors(net[0].bias, nn.Parameter(torch.ones(2)))  # which fails with a weak reference
    replace(net[0])
    replace(net[1])  # nothing else has held the first one
    replaced = first.take_replaced(net)
    assert {name: reference() for name, reference in replaced.items()} == {"0.weight": weight}
    assert not first.take_replaced(net)


def test_a_layer_that_has_left_the_module_is_not_replaced():
    net, first = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), FirstParameters()
    first.record(net)
    kept, weight = net[1], net[1].weight
    first.hold(net)
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
