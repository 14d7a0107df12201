"""The state of an optimizer by names goes to the parameters of these names."""

import pytest
import torch
from torch import nn

from dstrat.errors import CheckpointError
from dstrat.interfaces.state_dict import load_named_state, named_state


class Pair(nn.Module):
    def __init__(self, *names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))


def momentum(module, *groups):
    """An optimizer whose state shows of which parameter it is."""
    optimizer = torch.optim.SGD([{"params": [module.get_parameter(name) for name in group]} for group in groups], 0.1)
    for name, parameter in module.named_parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full((2,), float(ord(name)))}
    return optimizer


def test_a_module_whose_parameters_are_made_in_another_order_gets_its_own():
    saved = Pair("a", "b")
    state = named_state(momentum(saved, "ab"), saved)
    module = Pair("b", "a")
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    load_named_state(optimizer, module, state)
    for name, parameter in module.named_parameters():
        assert optimizer.state[parameter]["momentum_buffer"].tolist() == [ord(name)] * 2


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (("ab", "c"), "parameters in other groups than SGD has them here: a, c"),
        (("abc",), "is of 2 groups of 2 and 1 parameters, and SGD has 1 group of 3 parameters here"),
    ],
)
def test_parameters_in_other_groups_are_refused(groups, reason):
    module = Pair("a", "b", "c")
    state = named_state(momentum(module, "cb", "a"), module)
    with pytest.raises(CheckpointError, match=reason):
        load_named_state(momentum(module, *groups), module, state)
