"""Modules that change while they are trained, and parts of them that DeepSpeed is not made for."""

import pytest
import torch
from deepspeed_fit import Model, fit
from tests.ranks import in_ranks
from torch import nn

from dstrat.errors import MisuseError
from dstrat_deepspeed import DeepSpeedStrategy

STAGES = (0, 1, 2, 3)


class Changing(Model):
    def on_train_batch_start(self, batch, batch_idx) -> None:
        if batch_idx == 2:
            self.change()


class Freezing(Changing):
    def change(self):
        self.net.blocks.requires_grad_(False)


class Unfreezing(Freezing):
    def __init__(self):
        super().__init__()
        self.net.blocks.requires_grad_(False)

    def change(self):
        self.net.blocks.requires_grad_(True)


class AddingGroup(Unfreezing):
    def configure_optimizers(self):
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.01)

    def change(self):
        self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks.parameters())})


class Replacing(Changing):
    def change(self):
        self.net.last = nn.Linear(10, 3)


class Detaching(Changing):
    detaches = False

    def change(self):
        self.detaches = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss.detach() if self.detaches else loss


class Embedding(Model):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 3, max_norm=1.0)


class Penalized(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + sum(parameter.norm() for parameter in self.parameters())


class Calling(Model):
    """Calls a layer with tensors that it has computed from the parameters."""

    def training_step(self, batch, batch_idx):
        halves = {name: parameter / 2 for name, parameter in self.net.last.named_parameters()}
        inputs = torch.zeros(1, self.net.last.in_features)
        return super().training_step(batch, batch_idx) + torch.func.functional_call(self.net.last, halves, inputs).sum()


class Scaled(Model):
    """Has a parameter without a dimension, as CLIP has."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net.layers(inputs) * self.logit_scale, targets)


class Poisoned(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1)


REFUSED = {
    "freezing": (Freezing, STAGES[1:], "net.blocks.0.norm.weight.requires_grad has become False"),
    "unfreezing": (Unfreezing, STAGES[1:], "net.blocks.0.norm.weight.requires_grad has become True"),
    "adding a group": (AddingGroup, STAGES[1:], "configure_optimizers return all groups"),
    "replacing a layer": (Replacing, STAGES[3:], "net.last.weight, net.last.bias came to the module after"),
    "detaching the loss": (Detaching, STAGES, "does not depend on the parameters"),
    "a penalty on weights": (Penalized, STAGES[3:], "the loss has a term of parameters themselves"),
    "calling with other tensors": (Calling, STAGES[3:], "with other tensors as its parameters"),
    "an embedding that scales its weight": (Embedding, STAGES, "words is an Embedding with max_norm=1.0"),
}


def in_each_stage(cluster):
    found = {"messages": {}, "scaled": {}, "skipped": {}}
    for stage in STAGES:
        for name, (kind, stages, _) in REFUSED.items():
            if stage in stages:
                with pytest.raises(MisuseError) as raised:
                    fit(kind(), DeepSpeedStrategy(stage=stage), cluster)
                found["messages"][name, stage] = str(raised.value)
        found["scaled"][stage] = fit(Scaled(), DeepSpeedStrategy(stage=stage), cluster)
        poisoned = DeepSpeedStrategy(stage=stage)
        fit(Poisoned(), poisoned, cluster)
        found["skipped"][stage] = poisoned.skipped_steps
    return found


@pytest.fixture(scope="module")
def found(ranks):
    """What each rank has found."""
    return ranks(in_each_stage)


def test_what_zero_would_not_follow_is_an_error_that_says_what_to_do(found):
    for rank in found:
        assert len(rank["messages"]) == sum(len(stages) for _, stages, _ in REFUSED.values())
        for (name, stage), message in rank["messages"].items():
            assert REFUSED[name][2] in message, (name, stage)


def test_a_parameter_without_a_dimension_is_trained_as_on_one_device(found):
    expected = fit(Scaled(), "single_device")
    for rank in found:
        for stage, losses in rank["scaled"].items():
            assert losses == pytest.approx(expected, rel=1e-6, abs=0), stage


def test_the_number_of_skipped_steps_is_there_after_the_training(found):
    for rank in found:
        assert rank["skipped"] == {0: 0, 1: 1, 2: 1, 3: 1}


class SteppingItself(Model):
    """Steps a layer by an optimizer beside the returned one."""

    def __init__(self):
        super().__init__()
        self.beside = torch.optim.SGD(self.net.last.parameters(), lr=0.01)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.blocks.parameters(), lr=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.beside.step()


def step_itself(cluster):
    messages = {}
    for stage in STAGES[1:]:
        with pytest.raises(MisuseError) as raised:
            fit(SteppingItself(), DeepSpeedStrategy(stage=stage), cluster)
        messages[stage] = str(raised.value)
    return messages


def test_an_optimizer_beside_that_of_the_engine_raises():
    for messages in in_ranks(step_itself):
        for message in messages.values():
            assert message.startswith("the SGD steps 'net.last.weight' and 1 other parameters, which DeepSpeedStrategy")
