"""Steps whose gradients have been computed: which optimizers need another loss, and which do not."""

from __future__ import annotations

import pytest
import torch
from tests.sharpness import Sam
from torch import nn

from dstrat.errors import MisuseError
from dstrat.parallel.optimizer_checks import copy_with
from dstrat.parallel.optimizer_closures import closure_of_computed, recomputes_loss


class Own(torch.optim.SGD):
    """Is none of torch's own."""


class Wrapper(torch.optim.Optimizer):
    """Decays the weights, and steps another optimizer with the closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.9)
        return self.base.step(closure)


class BareWrapper(Wrapper):
    """Has the groups of the other optimizer, so that a copy of it cannot get other parameters."""

    @property
    def param_groups(self):
        return self.base.param_groups if "base" in vars(self) else self.of_construction

    @param_groups.setter
    def param_groups(self, groups):
        if "base" in vars(self):
            raise AttributeError("param_groups are those of the base")
        self.of_construction = groups


class Keeping(Sam):
    """Leaves it to the closure to clear the gradients."""

    def zero_grad(self):
        pass


class Optional(Sam):
    """Steps as its base does where it gets no closure."""

    def step(self, closure=None):
        return self.base.step() if closure is None else super().step(closure)


@torch.no_grad()
def clamp(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        torch._foreach_clamp_max_(group["params"], 0.5)


def skip(optimizer, args, kwargs):
    optimizer.zero_grad()


def stepped(kind, hook, steps=3, closure_of=lambda optimizer: None):
    """Return the weights after steps, and their gradients after the last one."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    optimizer = kind(net.parameters(), lr=0.1)
    if hook:
        optimizer.register_step_pre_hook(hook)
    for _ in range(steps):
        net.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        optimizer.step(closure_of(optimizer))
    gradient = net.weight.grad
    return net.weight.detach(), torch.zeros(3, 3) if gradient is None else gradient


def checked(optimizer):
    return closure_of_computed(optimizer, "pass a closure")


@pytest.mark.parametrize("hook", [None, clamp, skip])
@pytest.mark.parametrize("kind", [Own, Wrapper, BareWrapper])
def test_changes_of_weights_before_a_closure_that_is_not_needed_are_allowed(kind, hook):
    for seen, expected in zip(stepped(kind, hook, closure_of=checked), stepped(kind, hook), strict=True):
        assert torch.equal(seen, expected)


@pytest.mark.parametrize("kind", [Sam, Keeping, Optional])
def test_an_optimizer_that_goes_on_with_the_gradients_of_another_loss_is_refused(kind):
    with pytest.raises(MisuseError, match=rf"^{kind.__name__} computes another loss .*: pass a closure"):
        stepped(kind, None, closure_of=checked)


def test_an_optimizer_that_recomputes_the_loss_is_told_from_wrappers_by_copies_that_change_nothing():
    net = nn.Linear(3, 3)
    for kind in (Sam, Keeping, Wrapper, BareWrapper, Own):
        optimizer = kind(net.parameters(), lr=0.1)
        net(torch.ones(2, 3)).sum().backward()
        before = [(one.clone(), one.grad) for one in net.parameters()]
        assert recomputes_loss(optimizer) is issubclass(kind, Sam)
        for one, (value, gradient) in zip(net.parameters(), before, strict=True):
            assert torch.equal(one, value)
            assert one.grad is gradient


def test_an_optimizer_is_tried_once(monkeypatch):
    tried = []

    def copied(*arguments):
        tried.append(arguments)
        return copy_with(*arguments)

    monkeypatch.setattr("dstrat.parallel.optimizer_closures.copy_with", copied)
    stepped(Own, clamp, closure_of=checked)
    assert len(tried) == 1


def test_a_compiled_step_is_compiled_once():
    class Third(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=0.1)

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    net = nn.Linear(3, 3)
    optimizer = Third(net.parameters(), {})
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(4):
        net.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        step(checked(optimizer))
    assert len(compiled) == 1
