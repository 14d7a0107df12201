"""Ranks that use different parameters in one backward pass, or the same ones in another order."""

import re

import pytest
import torch
from deepspeed_fit import Model, fit
from tests.ranks import each
from torch import nn
from torch.utils.checkpoint import checkpoint

from dstrat.errors import MisuseError
from dstrat_deepspeed import DeepSpeedStrategy


class Branches(Model):
    """Takes another one of two branches in each batch and on each of two ranks, or both one after the other."""

    begins = 0
    is_in_turn = False
    sizes = (3, 3)

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(3, size), nn.Linear(size, 3)) for size in self.sizes)

    def training_step(self, batch, batch_idx):
        self.begun = batch_idx
        if self.trainer.world_size > 1:
            return self.loss_of(batch, batch_idx + (self.global_rank if batch_idx >= self.begins else 0))
        shares = [[tensor[rank::2] for tensor in batch] for rank in range(2)]
        return sum(self.loss_of(share, batch_idx + rank) for rank, share in enumerate(shares)) / 2

    def loss_of(self, batch, which):
        inputs, targets = batch
        first, second = self.branches[which % 2], self.branches[1 - which % 2]
        outputs = first(self.net.layers(inputs))
        return nn.functional.mse_loss(second(outputs) if self.is_in_turn else outputs, targets)


class Unequal(Branches):
    sizes = (3, 5)


class InTurn(Branches):
    is_in_turn = True


class Advised(Unequal):
    """Runs all layers in the same order, as stage 3 demands."""

    def loss_of(self, batch, which):
        inputs, targets = batch
        outputs = [branch(self.net.layers(inputs)) for branch in self.branches]
        return nn.functional.mse_loss(outputs[which % 2], targets) + 0 * outputs[1 - which % 2].sum()


class Shared(Branches):
    """Runs a branch twice, whose activations are computed anew in parts of the backward pass of their own."""

    def loss_of(self, batch, which):
        inputs, targets = batch
        outputs = self.net.layers(inputs)
        for _ in range(2):
            outputs = checkpoint(self.branches[which % 2], outputs, use_reentrant=True)
        return nn.functional.mse_loss(outputs, targets)


class ByItself(Unequal):
    """Steps after two batches, with manual optimization."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()
        return loss.detach()


WAYS = {
    "equal": (Branches, {}),
    "in turn": (InTurn, {}),
    "shared": (Shared, {}),
    "accumulated": (Unequal, {"accumulate_grad_batches": 3}),
    "by itself": (ByItself, {}),
    "advised": (Advised, {}),
}
SMALL = {"reduce_bucket_size": 60}
SIMPLE = {"contiguous_gradients": False, "overlap_comm": False, "reduce_scatter": False}
CASES = {
    (stage, way): {"stage": stage, "way": way, **options}
    for stage, way, options in (
        (0, "equal", {}),
        (1, "equal", {}),
        (2, "in turn", SMALL),
        (1, "shared", {}),
        (2, "shared", {}),
        (1, "accumulated", SMALL),
        (2, "accumulated", {}),
        (1, "by itself", {}),
        (2, "by itself", SIMPLE),
        (3, "advised", {}),
    )
}


def losses_of(cluster, stage, way, **options):
    module, trainer = WAYS[way]
    return fit(module(), DeepSpeedStrategy(stage=stage, **options), cluster, max_epochs=2, **trainer)


def test_losses_are_those_of_one_device_where_ranks_use_different_parameters(ranks):
    expected = {way: fit(module(), "single_device", max_epochs=2, **trainer) for way, (module, trainer) in WAYS.items()}
    for found in ranks(each, function=losses_of, cases=CASES):
        for case, losses in found.items():
            assert losses == pytest.approx(expected[case[1]], rel=2e-6, abs=0), case


def what_stage_3_says(cluster, module, **attributes):
    """Return the error of a fit, and the batch in which it was raised."""
    module = module()
    vars(module).update(attributes)
    with pytest.raises(MisuseError) as raised:
        fit(module, DeepSpeedStrategy(stage=3), cluster)
    return str(raised.value), module.begun


def test_stage_3_says_on_all_ranks_in_the_same_step_what_differs(ranks):
    cases = {
        "first": {"module": Unequal},
        "later": {"module": Branches, "begins": 2},
        "in turn": {"module": InTurn},
    }
    for found in ranks(each, function=what_stage_3_says, cases=cases):
        assert {case: batch for case, (_, batch) in found.items()} == {"first": 0, "later": 2, "in turn": 0}
        for said, _ in found.values():
            assert re.search(
                r"rank 0 gathers branches\.0\S* .*while rank 1 gathers branches\.1\S* .*: let each rank run", said
            )


def what_is_said_where_gradients_come_again(cluster, **options):
    module = Shared()
    module.loss_of = lambda batch, which: Shared.loss_of(module, batch, 0)
    with pytest.raises(MisuseError) as raised:
        fit(module, DeepSpeedStrategy(**options), cluster)
    return str(raised.value)


def test_gradients_that_come_again_after_the_ranks_have_averaged_them_are_an_error(ranks):
    cases = {
        "averaged": {"stage": 2, "reduce_bucket_size": 20},
        # DeepSpeed itself trains on with the last gradients alone, and in one bucket raises an empty AssertionError.
        "overwritten": {"stage": 3, "reduce_bucket_size": 20},
        "in one bucket": {"stage": 3},
    }
    for found in ranks(each, function=what_is_said_where_gradients_come_again, cases=cases):
        for said in found.values():
            assert re.match(
                r"branches\.0\.\S+ has got gradients several times in one backward pass.*use_reentrant=False", said
            )
