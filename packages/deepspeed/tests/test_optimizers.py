"""Whatever steps is the optimizer that schedulers and checkpoints know, and it treats each element by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Losses, Saves, loader, quiet_trainer
from torch import nn

from dstrat import SingleDeviceStrategy, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import MisuseError, RequestError
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_deepspeed.optimizers import check_elementwise

BATCHES, SAVED_AT = 6, 3


class WithAdagrad(TrainModule):
    """Has an optimizer that makes its state in the constructor, with values of its own."""

    options = {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.3}  # noqa: RUF012 - a test's

    def make_layers(self):
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def __init__(self):
        super().__init__()
        self.make_layers()

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), **self.options)


class AlreadySharded(WithAdagrad):
    """Makes its layers where stage 3 shards them at once, so that the optimizer's first state is empty."""

    def __init__(self):
        TrainModule.__init__(self)

    def configure_model(self):
        self.make_layers()


class Named(WithAdagrad):
    """Leaves the optimizer to the configuration."""

    def configure_optimizers(self):
        return None


class Counting(torch.optim.Optimizer):
    """Counts steps in a tensor of one element for each parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(steps=torch.zeros(1), mean=torch.zeros_like(parameter))
                state["steps"] += 1
                state["mean"].lerp_(parameter.grad, 0.1)
                parameter.sub_(state["mean"] / (1 - 0.9 ** state["steps"].item()), alpha=group["lr"])


class WithCounts(WithAdagrad):
    """Has such an optimizer, and a group of one parameter with one element."""

    def make_layers(self):
        super().make_layers()
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]) * self.scale, batch[1])

    def configure_optimizers(self):
        return Counting([{"params": [*self.layers.parameters()]}, {"params": [self.scale]}], lr=0.05)


class HasStepped(WithAdagrad):
    """Has an optimizer that has stepped before."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return optimizer


class Early(torch.optim.SGD):
    """Makes state in its constructor."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter)


class HasEarlyState(WithAdagrad):
    """Has an optimizer with state from its constructor."""

    def configure_optimizers(self):
        return Early(self.parameters(), lr=0.05)


NAMES_ADAGRAD = {"optimizer": {"type": "Adagrad", "params": WithAdagrad.options}}
CASES = {
    "constructor": {"cls": WithAdagrad},
    "sharded before": {"cls": AlreadySharded},
    "named": {"cls": Named, "config": NAMES_ADAGRAD},
    "bf16": {"cls": WithAdagrad, "precision": "bf16-true"},
    "counts": {"cls": WithCounts},
}


def fit(strategy, cluster, module, folder, precision="32-true", **options):
    losses = Losses()
    trainer = quiet_trainer(
        strategy,
        cluster,
        precision=precision,
        plugins=[PortableCheckpointIO()],
        default_root_dir=folder,
        callbacks=[losses, *options.pop("callbacks", ())],
    )
    trainer.fit(module, loader(BATCHES * 8, batch_size=8 if cluster is None else 4), **options)
    return losses.losses


def whole_and_resumed(cluster, folder, stage, cls, config=None, **options):
    folder = Path(folder)
    saves = Saves(folder, (SAVED_AT,))
    whole = fit(DeepSpeedStrategy(stage=stage, config=config), cluster, cls(), folder, callbacks=[saves], **options)
    again = DeepSpeedStrategy(stage=stage, config=config)
    resumed = fit(again, cluster, cls(), folder, ckpt_path=folder / str(SAVED_AT), **options)
    return whole, resumed == whole[SAVED_AT:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_goes_on_with_the_state_that_it_was_made_with(stage, tmp_path):
    cases = {name: {**case, "stage": stage, "folder": str(tmp_path / name)} for name, case in CASES.items()}
    expected = {
        cls: fit(SingleDeviceStrategy(), None, cls(), tmp_path) for cls in (WithAdagrad, AlreadySharded, WithCounts)
    }
    expected[Named] = expected[WithAdagrad]
    for found in in_ranks(each, function=whole_and_resumed, cases=cases):
        for name, case in CASES.items():
            losses, is_exact = found[name]
            tolerance = 1e-6 if "precision" not in case else 0.05
            assert losses == pytest.approx(expected[case["cls"]], rel=tolerance, abs=0), name
            assert is_exact, name


@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (0, "bf16-true")])
@pytest.mark.parametrize(("cls", "name"), [(HasStepped, "Adam"), (HasEarlyState, "Early")])
def test_an_optimizer_with_state_of_replaced_parameters_is_refused(cls, name, stage, precision, tmp_path):
    with pytest.raises(MisuseError, match=rf"^the {name} has state of parameters .*: build it in configure_optimizers"):
        fit(DeepSpeedStrategy(stage=stage), None, cls(), tmp_path, precision)


# Optimizers that nobody knows


class OfNorms(torch.optim.Optimizer):
    """Scales its step by the norm of a whole parameter, as Lamb does."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.scale = 0.5

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(group, parameter)

    def update(self, group, parameter):
        parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"] * self.scale)


class OfSigns(OfNorms):
    """Treats each element by itself."""

    def update(self, group, parameter):
        parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * self.scale)


class OfNoise(OfNorms):
    """Draws random numbers, with which nobody can compare."""

    def update(self, group, parameter):
        parameter.sub_(parameter.grad + torch.randn_like(parameter), alpha=group["lr"])


class OfMatrices(OfSigns):
    """Takes no pieces of a matrix, and does not say why."""

    def update(self, group, parameter):
        if parameter.dim() < 2:
            raise AssertionError
        super().update(group, parameter)


def test_an_error_without_a_text_is_named_by_its_type():
    with pytest.raises(RequestError, match=r"flat pieces of some \(AssertionError\)"):
        check_elementwise(OfMatrices([nn.Parameter(torch.ones(2, 2))]), 2, torch.device("cpu"))


class OfHistory(OfSigns):
    """Has tensors of earlier steps, which a checkpoint cannot divide by the parameters."""

    def update(self, group, parameter):
        super().update(group, parameter)
        self.state[parameter].setdefault("history", {"signs": []})["signs"].append(parameter.grad.sign())


class OfTable(OfSigns):
    """Has a table for each parameter."""

    def update(self, group, parameter):
        super().update(group, parameter)
        self.state[parameter].setdefault("table", torch.ones(3))


class OfSizes(OfSigns):
    """Has a number of each parameter, in a tensor of one element, which it may use later."""

    def update(self, group, parameter):
        super().update(group, parameter)
        self.state[parameter]["size"] = parameter.grad.abs().max().reshape(1)


class OfNorms(OfSigns):
    """Has a Python number of each parameter, which it may use later."""

    def update(self, group, parameter):
        super().update(group, parameter)
        self.state[parameter]["norm"] = parameter.grad.norm().item()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OfHistory, "its state 'history' has tensors in a dict"),
        (OfSizes, "its state 'size' is a number of the whole parameter"),
        (OfNorms, "its state 'norm' is a number of the whole parameter"),
        (OfTable, "its state 'table' is a tensor of another shape than the parameter"),
    ],
)
def test_state_that_a_checkpoint_could_not_divide_is_refused(kind, reason):
    parameters = [nn.Parameter(torch.ones(2, 2))]
    for stage in (1, 2, 3):
        with pytest.raises(RequestError, match=reason):
            check_elementwise(kind(parameters), stage, torch.device("cpu"))
    check_elementwise(kind(parameters), 0, torch.device("cpu"))


def test_an_optimizer_that_needs_whole_parameters_is_refused_even_in_a_warm_up():
    parameters = [nn.Parameter(torch.ones(2, 2))]
    for stage in (1, 2, 3):
        with pytest.raises(RequestError, match=f"^OfNorms needs whole parameters, and stage {stage} of ZeRO"):
            check_elementwise(OfNorms(parameters, lr=0.0), stage, torch.device("cpu"))
    check_elementwise(OfNorms(parameters), 0, torch.device("cpu"))


@pytest.mark.parametrize("kind", [OfSigns, OfNoise])
def test_others_are_taken_and_not_changed_by_the_trial(kind):
    parameters = [nn.Parameter(torch.ones(2, 2))]
    optimizer = kind(parameters)
    torch.nn.functional.mse_loss(parameters[0], torch.zeros(2, 2)).backward()
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    before = parameters[0].detach().clone()
    check_elementwise(optimizer, 2, torch.device("cpu"))
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(parameters[0], before)
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["lr"] == 0.1


# Parameters that are stored in another order


class Transposed(WithAdagrad):
    def make_layers(self):
        super().make_layers()
        first = self.layers[0]
        first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_transposed_parameter_trains_like_others(stage, tmp_path):
    expected = fit(SingleDeviceStrategy(), None, WithAdagrad(), tmp_path)
    cases = {"transposed": {"cls": Transposed, "stage": stage, "folder": str(tmp_path)}}
    for found in in_ranks(each, function=whole_and_resumed, cases=cases):
        losses, is_exact = found["transposed"]
        assert losses == pytest.approx(expected, rel=1e-6, abs=0)
        assert is_exact
