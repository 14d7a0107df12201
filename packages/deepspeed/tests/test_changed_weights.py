"""Weights that hooks change: the training goes on with them, or says that stage 3 has lost the change."""

import copy
from contextlib import nullcontext

import pytest
import torch
from deepspeed_fit import Model, fit
from tests.ranks import in_ranks
from torch import nn

from dstrat.errors import MisuseError
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)
LARGE = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # none counts as small


def gathered(module):
    if not module.gathers:
        return nullcontext()
    import deepspeed  # only in ranks, as it is slow

    return deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0)


class Changing(Model):
    """Sets and clips its weights in the hooks that it is told."""

    def __init__(self, *hooks, gathers=False):
        super().__init__()
        self.hooks, self.gathers = hooks, gathers

    @torch.no_grad()
    def change(self, hook, how):
        if hook in self.hooks:
            with gathered(self):
                for parameter in self.parameters():
                    how(parameter)

    def on_train_start(self):
        self.change("start", lambda parameter: nn.init.constant_(parameter, 0.1))

    def on_train_batch_start(self, batch, batch_idx) -> None:
        self.change("batch start", lambda parameter: parameter.mul_(0.97))

    def on_after_backward(self):
        self.change("backward", lambda parameter: parameter.mul_(0.98))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.change("batch end", lambda parameter: parameter.clamp_(-0.2, 0.2))
        self.change("data", lambda parameter: parameter.data.clamp_(-0.2, 0.2))
        self.change("replaced", lambda parameter: setattr(parameter, "data", parameter.data * 0.9))

    def on_train_end(self):
        self.change("end", lambda parameter: parameter.fill_(3.0))


class Teacher(Model):
    """Keeps a mean of its weights, from which it learns too."""

    def __init__(self, *, gathers=False):
        super().__init__()
        self.gathers = gathers
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        distance = nn.functional.mse_loss(self.net.layers(inputs), self.teacher.layers(inputs))
        return super().training_step(batch, batch_idx) + distance

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with gathered(self), torch.no_grad():
            for mean, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)


HOOKS = {
    "at the start": ("start",),
    "before and after a batch": ("start", "batch start", "batch end"),
    "within a batch": ("start", "backward"),
    "as plain data": ("start", "data", "replaced"),
}


def in_each_stage(cluster):
    found = {}
    for stage in STAGES[:3]:
        for name, hooks in HOOKS.items() if stage else ():  # stage 0 updates the parameters themselves
            found[stage, name] = fit(Changing(*hooks), DeepSpeedStrategy(stage=stage), cluster)
        found[stage, "bf16"] = fit(
            Changing(*HOOKS["before and after a batch"]), DeepSpeedStrategy(stage=stage), cluster, precision="bf16-true"
        )
        found[stage, "teacher"] = fit(Teacher(), DeepSpeedStrategy(stage=stage), cluster)
    for name in ("at the start", "before and after a batch"):
        module = Changing(*HOOKS[name], gathers=True)
        found[3, name] = fit(module, DeepSpeedStrategy(stage=3), cluster)
    module = Changing(*HOOKS["before and after a batch"], gathers=True)
    found[3, "bf16"] = fit(module, DeepSpeedStrategy(stage=3), cluster, precision="bf16-true")
    found[3, "teacher"] = fit(Teacher(gathers=True), DeepSpeedStrategy(config=LARGE), cluster)
    module = Changing("end")
    fit(module, DeepSpeedStrategy(stage=3), cluster)  # small parameters are whole, outside of their layers too
    found[3, "end"] = {float(value) for p in module.parameters() if not p.is_meta for value in p.detach().unique()}
    return found


class Momentum(Teacher):
    """Its mean changes in the step, by an assignment, as momentum encoders have it."""

    def training_step(self, batch, batch_idx):
        for mean, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mean.data = mean.data * 0.5 + parameter.data * 0.5
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Measuring(nn.Module):
    """Takes its scale from its first batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.has_scale = False

    def forward(self, x):
        if not self.has_scale:
            self.scale.data.copy_(torch.full_like(self.scale, 0.5))
            self.has_scale = True
        return x * self.scale


class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.measuring = Measuring()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.measuring(self.net.layers(inputs)), targets)


CHANGES = {
    "batch end": (lambda: Changing("batch end"), LARGE),
    "teacher": (Teacher, LARGE),
    "replaced": (lambda: Changing("replaced"), LARGE),
    "replaced at the end": (lambda: Changing("replaced"), LARGE),
    "momentum": (Momentum, LARGE),
    "plain data where some are gathered": (lambda: Changing("data"), {"zero_optimization": {"stage": 3}}),
    "in the forward": (Scaled, LARGE),
}


def lost(cluster):
    found = {}
    for name, (make, config) in CHANGES.items():
        with pytest.raises(MisuseError) as raised:
            fit(make(), DeepSpeedStrategy(config=config), cluster, max_steps=1 if name.endswith("end") else -1)
        found[name] = str(raised.value)
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
    return found


class FirstValues(Model):
    """A layer takes first values from its first batch."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        inputs, _ = batch
        if batch_idx == 0:
            with torch.no_grad():
                self.shift.fill_(inputs.mean())
        return super().training_step(batch, batch_idx) * self.shift


def of_each_rank(cluster):
    found = {}
    for stage in STAGES[:3]:
        with pytest.raises(MisuseError) as raised:
            fit(FirstValues(), DeepSpeedStrategy(stage=stage), cluster)
        found[stage] = str(raised.value)
    return found


def test_first_values_from_the_batch_of_a_rank_are_an_error_before_the_first_step(ranks):
    for found in ranks(of_each_rank):
        for message in found.values():
            assert message.startswith("ranks have other values of the parameter 'shift' in optimizer step 1 (norms")


def test_the_training_goes_on_with_changed_weights(ranks):
    expected = {name: fit(Changing(*hooks), "single_device") for name, hooks in HOOKS.items()}
    expected["teacher"] = fit(Teacher(), "single_device")
    expected["bf16"] = expected["before and after a batch"]
    assert expected["bf16"] != expected["at the start"]
    first, _ = ranks(in_each_stage)
    assert first.pop((3, "end")) == {3.0}
    for (stage, name), losses in first.items():
        within = 0.05 if name == "bf16" else 2e-6
        assert losses == pytest.approx(expected[name], rel=within, abs=0), (stage, name)


def test_a_change_that_stage_3_loses_is_an_error_that_names_the_parameter_and_the_way(ranks):
    for found in ranks(lost):
        assert "net.scale was changed" in found["batch end"]
        assert "GatheredParameters" in found["batch end"]
        assert "teacher.scale was changed" in found["teacher"]
        assert "teacher." in found["momentum"]
        assert "measuring.scale was changed" in found["in the forward"]
        assert all("GatheredParameters" in message for message in found.values())


class Joined(nn.Module):
    """Layers that are gathered together where DeepSpeed's granularity says so."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Unchanged(Model):
    """Changes no weights; saves files of DeepSpeed's engine in a hook."""

    def __init__(self, path=None):
        super().__init__()
        self.path, self.joined = path, Joined()

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.joined(self.net.layers(inputs)), targets)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.path is not None:
            self.trainer.strategy.engine.save_checkpoint(self.path)


JOINED = {"zero_optimization": {**LARGE["zero_optimization"], "stage3_module_granularity_threshold": 10}}
ROUNDED = {**LARGE, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
UNCHANGED = {"files": LARGE, "memory shared by a layer's parameters": JOINED, "rounded values in gathers": ROUNDED}


def unchanged(cluster, path):
    return {
        name: fit(
            Unchanged(path if config is LARGE else None),
            DeepSpeedStrategy(config=config),
            cluster,
            precision="bf16-mixed" if config is ROUNDED else "32-true",
        )
        for name, config in UNCHANGED.items()
    }


def test_what_stage_3_itself_does_with_weights_is_no_change(tmp_path):
    expected = fit(Unchanged(), "single_device")
    for found in in_ranks(unchanged, path=str(tmp_path)):
        for name, losses in found.items():
            assert losses == pytest.approx(expected, rel=0.02 if "rounded" in name else 1e-5), name
    assert (tmp_path / "latest").exists()


# Reads of weights in hooks


class Reading(Model):
    """Copies a part of itself in a hook, with and without gathering it; saves a checkpoint."""

    def __init__(self, path):
        super().__init__()
        self.path, self.messages, self.copied = path, [], {}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for read in (self.state_dict, self.net.blocks[0].state_dict, lambda: copy.deepcopy(self.net)):
            with pytest.raises(MisuseError) as raised:
                read()
            self.messages.append(str(raised.value))
        self.gathers = True
        with gathered(self):
            self.copied = {**copy.deepcopy(self.net).state_dict(), "state": copy.deepcopy(self.net.state_dict())}
        self.trainer.save_checkpoint(self.path)


def read_in_a_hook(cluster, path):
    module = Reading(path)
    fit(module, DeepSpeedStrategy(config=LARGE), cluster, max_steps=1)
    state = {name: value.tolist() for name, value in module.net.state_dict().items() if not value.is_meta}
    again = {
        name: value.tolist() for name, value in copy.deepcopy(module.net).state_dict().items() if not value.is_meta
    }
    copied = module.copied.pop("state")
    return (
        module.messages,
        [{name: one.tolist() for name, one in each.items()} for each in (copied, module.copied)],
        state,
        again,
    )


def test_a_state_dict_or_copy_without_values_is_an_error(tmp_path):
    found = in_ranks(read_in_a_hook, path=tmp_path / "saved")
    for messages, copies, *_ in found:
        assert all("would have empty tensors" in message for message in messages)
        assert copies[0] == copies[1] == found[0][2]  # rank 0 has the module after the run
    assert found[0][2] == found[0][3]
