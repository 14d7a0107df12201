from __future__ import annotations

import math
import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from dstrat import TrainModule
from dstrat.errors import AnomalyError
from dstrat.training.anomaly import AnomalyDetection


class Log(nn.Module):
    def forward(self, x):
        return {"log": (x.log(),), "count": 3}


class Blow(nn.Module):
    def forward(self, x):
        return x / 0


class Net(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.parts(x)


def watched(module):
    return AnomalyDetection(module, lambda: "epoch 0, batch 12, rank 1")


def fails(text):
    return pytest.raises(AnomalyError, match=f"^{re.escape(text)}$")


def test_the_innermost_module_that_makes_nan_is_named():
    with (
        fails(
            "the output of 'parts.1' (Log) has NaN (epoch 0, batch 12, rank 1); its input and its parameters are finite"
        ),
        watched(net := Net(nn.Linear(2, 2), Log())),
    ):
        net.parts[1](-torch.ones(1, 2))
    with pytest.raises(FloatingPointError, match=r"'parts\.0' \(Log\)"), watched(net := Net(Log())):
        net(torch.tensor([-1.0, 1.0]))


def test_a_parameter_that_is_nan_already_is_named():
    net = Net(nn.Linear(2, 2), nn.Linear(2, 2))
    net.parts[1].bias.data[0] = math.nan
    with (
        fails(
            "the output of 'parts.1' (Linear) has NaN (epoch 0, batch 12, rank 1); its parameter 'bias' has NaN: "
            "look at the last step of the optimizer, and at initial values"
        ),
        watched(net),
    ):
        net(torch.ones(1, 2))


def test_a_batch_with_nan_is_told_from_a_module_that_makes_it():
    with (
        pytest.raises(AnomalyError, match="its input has NaN, which no module before it put out: look at the batch"),
        watched(net := Net(nn.BatchNorm1d(2))),
    ):
        net(torch.full((3, 2), math.nan))


def test_infinite_values_are_no_error_by_themselves_and_are_named_when_nan_comes_of_them():
    with watched(net := Net(Blow())) as anomalies:
        net(torch.ones(1, 2))
        anomalies.check_loss(torch.tensor(1.0))
    with (
        fails(
            "the output of 'parts.1' (Linear) has NaN (epoch 0, batch 12, rank 1); its input has inf, its parameters "
            "are finite; the first infinite values were in the output of 'parts.0' (Blow)"
        ),
        watched(net := Net(Blow(), linear := nn.Linear(2, 1))),
    ):
        linear.weight.data = torch.tensor([[1.0, -1.0]])
        net(torch.ones(1, 2))


def test_infinite_values_of_an_earlier_batch_are_forgotten():
    with watched(net := Net(Blow())) as anomalies:
        net(torch.ones(1, 2))
        anomalies.check_loss(torch.tensor(1.0))
        with pytest.raises(AnomalyError, match="the outputs of all modules were finite"):
            anomalies.check_loss(torch.tensor(math.nan))


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "NaN"), (-math.inf, "inf")])
def test_a_loss_that_is_not_finite_is_an_error_that_says_when_and_where(loss, word):
    with (
        fails(
            f"the loss is {word} (epoch 0, batch 12, rank 1); "
            "the outputs of all modules were finite, so it was computed from them"
        ),
        watched(Net()) as anomalies,
    ):
        anomalies.check_loss(torch.tensor(loss))


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_nan_in_the_backward_pass_names_the_operation():
    x = torch.zeros(1, requires_grad=True)
    with (
        pytest.raises(
            AnomalyError, match=r"'SqrtBackward0' returned nan values .* backward pass \(epoch 0, batch 12, rank 1\)"
        ),
        watched(Net()),
    ):
        (x.sqrt() * 0).backward()


def test_other_errors_pass_and_nothing_is_left_behind():
    net = Net(Log())
    with watched(net):
        assert torch.is_anomaly_enabled()
    with pytest.raises(RuntimeError, match="mine"), watched(net):
        raise RuntimeError("mine")
    assert not torch.is_anomaly_enabled()
    net(-torch.ones(1, 2))


def test_values_that_cannot_be_nan_are_left_alone():
    @dataclass
    class Output:
        ids: torch.Tensor
        value: torch.Tensor

    class Odd(nn.Module):
        def forward(self, x):
            sparse = torch.eye(2).to_sparse()
            return [Output(torch.ones(2, dtype=torch.int64), x), sparse, torch.ones(2, device="meta"), "text", None]

    with watched(net := Net(Odd())):
        net(torch.ones(1, 2))
        with pytest.raises(AnomalyError, match="Odd"):
            net(torch.full((1, 2), math.nan))


class Fails(TrainModule):
    """Has an infinite loss in one batch, or a layer that makes NaN in it."""

    def __init__(self, *, in_layer):
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.log_of = Log()
        self.in_layer = in_layer

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        if batch_idx == 2:
            return self.log_of(-loss - 1)["log"][0] if self.in_layer else loss / 0
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


@pytest.mark.parametrize(
    ("in_layer", "said"),
    [
        (True, r"^the output of 'log_of' \(Log\) has NaN \(epoch 0, batch 2, rank 0\); its input and"),
        (False, r"^the loss is inf \(epoch 0, batch 2, rank 0\); the outputs of all modules were finite"),
    ],
)
def test_a_trainer_that_detects_anomalies_says_where_they_were(quiet_trainer, loader, in_layer, said):
    with pytest.raises(AnomalyError, match=said):
        quiet_trainer(detect_anomaly=True).fit(Fails(in_layer=in_layer), loader())
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(
    ("checked", "loaders", "place"),
    [
        (0, 1, "epoch 1, validation batch 2, rank 0"),
        (0, 2, "epoch 1, validation batch 2 of loader 0, rank 0"),
        (-1, 1, "epoch 0, sanity check batch 2, rank 0"),
    ],
)
def test_an_anomaly_in_validation_is_found_there(quiet_trainer, loader, checked, loaders, place):
    class FailsInValidation(Fails):
        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            if self.trainer.sanity_checking or self.current_epoch == 1:
                super().training_step(batch, batch_idx)

    trainer = quiet_trainer(detect_anomaly=True, num_sanity_val_steps=checked)
    with pytest.raises(AnomalyError, match=rf"^the output of 'log_of' \(Log\) has NaN \({place}\)"):
        trainer.fit(FailsInValidation(in_layer=True), loader(), [loader() for _ in range(loaders)])
