"""Evaluation through a pipeline: all arguments of the model reach its layers, and batches may be uneven."""

import pytest
import torch
from tests.accelerators import make_accelerator
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import TrainModule
from dstrat.errors import MisuseError
from dstrat.interfaces.pipeline import Pipeline
from dstrat_mesh import MeshStrategy


class Scaled(nn.Module):
    """Its second layer has a further argument."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, scale=None):
        return self.last(self.middle(self.first(x) * scale.unsqueeze(1)))


CALLS = {
    "positional": lambda net, x, scale: net(x, scale),
    "keywords": lambda net, x, scale: net(x=x, scale=scale),
    "both": lambda net, x, scale: net(x, scale=scale),
}


class Net(TrainModule):
    def __init__(self, call, has_compute):
        super().__init__()
        torch.manual_seed(0)
        self.net = Scaled()
        self.call, self.has_compute = call, has_compute

    def configure_pipeline(self):
        def compute(layers, value, batch):
            for layer in layers:
                value = layer(value)
                if layer is self.net.first:
                    value = value * (batch["scale"] if isinstance(batch, dict) else batch[1]).unsqueeze(1)
            return value

        return Pipeline(
            model=self.net,
            layers=[self.net.first, self.net.middle, self.net.last],
            inputs=lambda batch: batch["x"] if isinstance(batch, dict) else batch[0],
            compute=compute if self.has_compute else None,
            loss=lambda output, batch: output.square().mean(),
        )

    def training_step(self, batch, batch_idx):
        return self.net(*batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("value", CALLS[self.call](self.net, *batch).square().mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def evaluated(cluster, call, has_compute=True, entry="validate", size=8):
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(size, 6, generator=generator), 5 * torch.rand(size, generator=generator))
    trainer = quiet_trainer("single_device" if cluster is None else MeshStrategy(pp=2), cluster)
    try:
        return getattr(trainer, entry)(Net(call, has_compute), DataLoader(data, batch_size=4))
    except MisuseError as error:
        return str(error)


def test_further_arguments_of_the_model_reach_its_layers():
    cases = {call: {"call": call} for call in ("positional", "keywords")}
    expected = each(None, evaluated, cases)
    for found in in_ranks(each, 2, function=evaluated, cases=cases):
        assert found == {call: [pytest.approx(values[0], rel=1e-6)] for call, values in expected.items()}


def test_arguments_that_no_layer_would_get_are_refused():
    cases = {
        "x, scale= in an evaluation step, and its pipeline passes either positional": {"call": "both"},
        "x, scale in an evaluation step, and its pipeline calls": {"call": "positional", "has_compute": False},
        "x=, scale= in an evaluation step, and its pipeline calls": {"call": "keywords", "has_compute": False},
    }
    for found in in_ranks(each, 2, function=evaluated, cases=cases):
        for expected, message in found.items():
            assert message.startswith(f"Scaled was called with {expected}")


def test_the_last_batch_of_a_test_may_be_uneven():
    case = {"call": "positional", "entry": "test", "size": 7}
    (expected,) = evaluated(None, **case)
    for found in in_ranks(evaluated, 2, **case):
        assert found == [pytest.approx(expected, rel=1e-6)]


class UsesWeights(Net):
    """Its step uses weights outside of the model."""

    def __init__(self, use):
        super().__init__("positional", has_compute=True)
        self.use = use
        self.outlines = []

    def validation_step(self, batch, batch_idx):
        USES[self.use](self, batch)
        super().validation_step(batch, batch_idx)
        USES[self.use](self, batch)


def ask_for_outlines(module, batch):
    for name, weight in module.named_parameters():
        assert isinstance(weight, nn.Parameter)
        of_weight = weight.shape, weight.dtype, weight.device.type, weight.requires_grad, weight.grad
        module.outlines.append((name, *of_weight))
        assert not weight.is_meta
        assert not hasattr(weight, "placements")
    assert module.device == module.trainer.strategy.root_device
    assert sum(weight.numel() for weight in {*module.parameters()}) == 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3


USES = {
    "first layer": lambda module, batch: nn.functional.linear(batch[0], module.net.first.weight),
    "last layer": lambda module, batch: module.net.last.bias.square().sum().item(),
    "all layers": lambda module, batch: torch.stack([weight.norm() for weight in module.parameters()]),
    "shards": lambda module, batch: module.net.last.bias.full_tensor(),
    "assigned": lambda module, batch: module.net.last.bias.data.zero_(),
    "outlines": ask_for_outlines,
}


def used(cluster, use):
    """Return what the steps of an evaluation have asked for, and its values; or its error."""
    data = TensorDataset(torch.ones(8, 6), torch.ones(8))
    module, trainer = UsesWeights(use), quiet_trainer(MeshStrategy(pp=2), cluster)
    try:
        values = trainer.validate(module, DataLoader(data, batch_size=4))
    except MisuseError as error:
        return str(error)
    return module.outlines[: len([*module.parameters()])], values


def test_use_of_weights_in_evaluation_steps_is_an_error_everywhere():
    names = {
        "first layer": "net.first.weight",
        "last layer": "net.last.bias",
        "all layers": "net.first.weight",
        "shards": "net.last.bias",
        "assigned": "net.last.bias",
    }
    cases = {use: {"use": use} for use in names}
    for found in in_ranks(each, 2, function=used, cases=cases):
        for use, name in names.items():
            assert found[use].startswith(f"an evaluation step of UsesWeights has used {name!r}, a weight of one stage")


def test_outlines_of_weights_are_those_of_one_device_in_evaluation_steps():
    (device,) = make_accelerator().get_parallel_devices([0])
    expected = [
        (name, weight.shape, weight.dtype, device.type, True, None)
        for name, weight in Net("positional", has_compute=True).named_parameters()
    ]
    for outlines, values in in_ranks(used, 2, use="outlines"):
        assert outlines == expected
        assert values[0]["value"] > 0
