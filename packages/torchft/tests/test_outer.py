"""Outer weights: which values an exchange has, in which order, and what an evaluation sees."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("torchft", reason="needs torchft")

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.builtin.precision.true import TruePrecision
from dstrat_torchft.diloco import TorchFTDiLoCoStrategy
from dstrat_torchft.outer import OuterSettings, OuterWeights

AVERAGING = OuterSettings(every=1, lr=1.0, momentum=0.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)


def train(net, by):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(by)
    net.norm.running_mean = net.norm.running_mean + by  # a new tensor, as modules of users make them


def exchange(nets, outers):
    mean = torch.stack([outer.changes(are_zero=False) for outer in outers]).mean(0)
    for outer in outers:
        outer.apply(mean, averages=False)
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.fixture
def groups():
    """Return two equal modules, and their outer weights."""
    torch.manual_seed(0)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    return nets, [OuterWeights(net, AVERAGING) for net in nets]


def test_buffers_that_a_module_has_replaced_are_averaged(groups):
    nets, outers = groups
    for net, by in zip(nets, (1.0, 3.0), strict=True):
        train(net, by)
    exchange(nets, outers)
    assert nets[0].norm.running_mean.tolist() == [2.0, 2.0]


def test_outer_weights_of_wrapped_layers_have_the_names_of_layers(groups):
    (net, wrapped), (outer, _) = groups
    net.body.bias.data.fill_(2.0)
    wrapped.body, wrapped.norm = (torch.compile(layer, backend="eager") for layer in (wrapped.body, wrapped.norm))
    outer_of_wrapped = OuterWeights(wrapped, AVERAGING)
    assert list(outer_of_wrapped.state_dict()["weights"]) == list(outer.state_dict()["weights"])
    state = outer.state_dict()
    outer_of_wrapped.load_state_dict(state)
    older = {
        key: {f"body._orig_mod.{n[5:]}" if n[:5] == "body." else n: v for n, v in state[key].items()} for key in state
    }
    outer.load_state_dict(older)
    outer_of_wrapped.write(older["weights"])
    assert torch.equal(wrapped.body.bias, state["weights"]["body.bias"])


def test_an_evaluation_has_weights_and_buffers_of_the_latest_exchange(groups):
    nets, outers = groups
    net, outer = nets[0], outers[0]
    before = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, 1.0)
    trained = {name: value.clone() for name, value in net.state_dict().items()}
    own = outer.inner_values()
    outer.write(outer.weights | outer.buffers)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    outer.write(own)
    assert all(torch.equal(trained[name], value) for name, value in net.state_dict().items())


def test_parameters_are_exchanged_in_the_order_of_the_module_whenever_they_were_unfrozen():
    torch.manual_seed(0)
    nets = [Net(), Net()]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[0].body.requires_grad_(False)
    outers = [OuterWeights(net, AVERAGING) for net in nets]
    nets[0].body.requires_grad_(True)
    outers[0].add_trained()
    for net, by in zip(nets, (1.0, 3.0), strict=True):
        train(net, by)
    exchange(nets, outers)


def test_state_comes_back(groups):
    nets, outers = groups
    train(nets[0], 1.0)
    outers[0].apply(outers[0].changes(are_zero=False), averages=False)
    outers[1].load_state_dict(outers[0].state_dict())
    for mine, other in ((outers[0].weights, outers[1].weights), (outers[0].buffers, outers[1].buffers)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_an_optimizer_that_steps_after_the_exchange_makes_one_at_the_end_necessary(monkeypatch):
    net = nn.Linear(2, 1)
    strategy = TorchFTDiLoCoStrategy(every=1, precision_plugin=TruePrecision(), lighthouse="http://127.0.0.1:1")
    strategy.connect(net)
    first, second = (torch.optim.SGD([parameter], lr=0.1) for parameter in net.parameters())
    strategy.optimizers = [first, second]
    strategy.add_components(cluster_environment=LocalEnvironment({}))
    strategy._replicas = SimpleNamespace(has_quorum=False, mark_end=lambda: None)
    exchanges = []

    def meet(_replicas, *, finishes=False):
        exchanges.append(finishes)
        strategy._in_sync = True

    monkeypatch.setattr(strategy, "_exchange", meet)
    for optimizer in (first, second):
        strategy.optimizer_step(optimizer, lambda: None)
    strategy.finish_training()
    assert exchanges == [False, True]
    strategy.finish_training()
    assert exchanges == [False, True]
