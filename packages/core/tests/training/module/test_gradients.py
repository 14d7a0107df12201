"""Norms of gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dstrat import grad_norm
from dstrat.errors import RequestError


@pytest.fixture
def module():
    made = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 1))
    made[0].weight.grad, made[0].bias.grad = torch.tensor([[3.0, -4.0]]), torch.tensor([2.0])
    made[1].weight.grad = torch.tensor([[-12.0]])
    return made


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (2, {"0.weight": 5.0, "0.bias": 2.0, "1.weight": 12.0, None: math.sqrt(173)}),
        (1, {"0.weight": 7.0, "0.bias": 2.0, "1.weight": 12.0, None: 21.0}),
        ("inf", {"0.weight": 4.0, "0.bias": 2.0, "1.weight": 12.0, None: 12.0}),
    ],
)
def test_each_gradient_and_all_together_have_a_norm(module, order, expected):
    start = f"grad_{float(order)}_norm"
    names = {name: f"{start}_total" if name is None else f"{start}/{name}" for name in expected}
    found = grad_norm(module, order)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {names[name]: value for name, value in expected.items()}
    )


def test_without_gradients_there_are_no_norms(module):
    assert grad_norm(nn.Linear(1, 1), 2) == {}
    assert "grad_2.0_norm.1.weight" in grad_norm(module, 2, group_separator=".")


@pytest.mark.parametrize("order", [0, -1, math.nan, "two", None])
def test_the_order_of_a_norm_is_a_positive_number(module, order):
    with pytest.raises(RequestError, match=rf"grad_norm\(norm_type={order!r}\): give a number above 0, or 'inf'"):
        grad_norm(module, order)


def test_a_module_logs_the_norms_before_each_step(quiet_trainer, line_class, loader):
    class Measured(line_class):
        def on_before_optimizer_step(self, optimizer):
            self.log_dict(grad_norm(self.layer, norm_type=2))

    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Measured(), loader())
    values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("grad")}
    total = values.pop("grad_2.0_norm_total")
    assert total == pytest.approx(math.hypot(values["grad_2.0_norm/weight"], values["grad_2.0_norm/bias"]))
