"""Losses with weights: an optimizer step is that of their weighted mean, and logged values have the same weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tests.accelerators import make_scaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, TrainModule
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import ConflictError, MisuseError, RankFailedError
from dstrat.parallel.loss_weights import LossWeights
from dstrat.training.metrics.reduction import Options
from dstrat.training.metrics.values import NumberEntry

WEIGHTS = {1: 4, 2: 1, 3: 0, 4: 7, 5: 2, 6: 2, 7: 3}
"""Weights of the batches, by their numbers; number 3 has no label, and the loss nan."""


class Weighted(TrainModule):
    """The gradient of a batch is its number, and lr is 1."""

    def __init__(self, without_loss=(), as_tensor=True):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.layer.weight)
        self.without_loss, self.as_tensor = without_loss, as_tensor
        self.steps = []

    def training_step(self, batch, batch_idx):
        number = int(batch[0])
        if number in self.without_loss:
            return None
        weight = WEIGHTS[number]
        nothing = nn.functional.cross_entropy(
            self.layer(batch[0]).expand(1, 2), torch.tensor([-100], device=self.device)
        )
        loss = self.layer(batch[0]).mean() if weight else nothing
        self.log("number", float(number) if weight else math.nan, on_epoch=True)
        self.log("alike", float(number), on_epoch=True, batch_size=1)
        return {"loss": loss, "weight": torch.tensor(weight) if self.as_tensor else weight}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch is not None:
            self.log("in_hook", float(batch[0]), on_epoch=True)

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.layer.weight.grad.item())

    def on_train_end(self):
        self.logged = {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class SaveAfter(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen == self.batch:
            trainer.save_checkpoint(self.path)


def numbers(count=7, **options):
    return DataLoader(TensorDataset(torch.arange(1.0, count + 1).view(-1, 1)), **options)


def mean(*values):
    total = sum(WEIGHTS[value] for value in values)
    return pytest.approx(sum(WEIGHTS[value] * value for value in values) / total if total else 0, rel=1e-6)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize(
    ("accumulate", "skipped", "groups"),
    [
        (1, (), [(1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        (3, (), [(1, 2, 3), (4, 5, 6), (7,)]),
        (2, (), [(1, 2), (3, 4), (5, 6), (7,)]),
        (3, (2,), [(1, 3), (4, 5, 6), (7,)]),
        (3, (1, 6), [(2, 3), (4, 5), (7,)]),
        (3, (1, 2, 7), [(3,), (4, 5, 6)]),
    ],
)
@pytest.mark.parametrize("is_batch", [True, False], ids=["batch", "loss"])
def test_batches_count_by_their_weights(quiet_trainer, accumulate, skipped, groups, is_batch, as_tensor):
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return None if int(batch[0]) in skipped else batch

    module = Weighted(without_loss=() if is_batch else skipped, as_tensor=as_tensor)
    data = numbers(collate_fn=collate) if is_batch and skipped else numbers()
    quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate).fit(module, data)
    assert module.steps == [mean(*group) for group in groups]


def test_values_logged_in_a_step_have_the_weight_of_its_loss(quiet_trainer):
    module = Weighted()
    quiet_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, numbers())
    assert module.logged["number_epoch"] == mean(*WEIGHTS)  # without the nan of the batch without weight
    assert module.logged["in_hook_epoch"] == mean(*WEIGHTS)
    assert module.logged["alike_epoch"] == 4


@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_resume_between_the_batches_of_a_step_goes_on_with_their_weights(quiet_trainer, tmp_path, as_tensor):
    for after in (1, 2):
        path = tmp_path / str(after)
        options = {"max_epochs": 1, "accumulate_grad_batches": 3}
        quiet_trainer(**options, callbacks=SaveAfter(3 + after, path)).fit(Weighted(as_tensor=as_tensor), numbers())
        resumed = Weighted(as_tensor=as_tensor)
        quiet_trainer(**options).fit(resumed, numbers(), ckpt_path=path)
        assert resumed.steps == [mean(4, 5, 6), mean(7)]
        assert resumed.logged["number_epoch"] == mean(*WEIGHTS)


class OfRanks(Weighted):
    """Writes the gradients of its steps, which are those of all ranks."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_end(self):
        if self.trainer.is_global_zero:
            self.path.write_text(json.dumps(self.steps))

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.layer.weight.grad.item())


@pytest.mark.parametrize("devices", [2, 1])
def test_a_resume_by_other_ranks_goes_on_with_the_weights_of_all(quiet_trainer, averaging, tmp_path, devices):
    path, steps = tmp_path / "saved", tmp_path / "steps"
    quiet_trainer(
        strategy=averaging(), devices=2, max_epochs=1, accumulate_grad_batches=3, callbacks=SaveAfter(1, path)
    ).fit(OfRanks(tmp_path / "whole"), numbers(6))
    assert json.loads((tmp_path / "whole").read_text()) == [mean(*range(1, 7))]
    strategy = {"strategy": averaging(), "devices": 2} if devices == 2 else {}
    accumulate = 3 if devices == 2 else 6
    quiet_trainer(**strategy, max_epochs=1, accumulate_grad_batches=accumulate).fit(
        OfRanks(steps), numbers(6), ckpt_path=path
    )
    assert json.loads(steps.read_text()) == [mean(*range(1, 7))]


def test_a_loss_scale_and_clipping_take_weights(quiet_trainer):
    module = Weighted()
    precision = MixedPrecision("16-mixed", scaler=make_scaler(init_scale=256.0))
    quiet_trainer(max_epochs=1, accumulate_grad_batches=3, plugins=precision, gradient_clip_val=1e6).fit(
        module, numbers()
    )
    groups = mean(1, 2, 3), mean(4, 5, 6), mean(7)
    assert module.steps == [pytest.approx(step.expected, rel=1e-3) for step in groups]


def test_an_optimizer_that_computes_the_loss_several_times_takes_weights(quiet_trainer):
    class Repeats(Weighted):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=2)

    module = Repeats()
    quiet_trainer(max_epochs=1).fit(module, numbers(2))
    assert module.steps == [1, 1, 2, 2]


# Manual optimization


class ByHand(Weighted):
    """Steps after three batches, or as many as a list says."""

    def __init__(self, as_tensor=True, sizes=(3, 3, 1)):
        super().__init__(as_tensor=as_tensor)
        self.automatic_optimization = False
        self.ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.manual_backward(outputs["loss"], weight=outputs["weight"])
        if batch_idx + 1 in self.ends:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("sizes", [(1,) * 7, (3, 3, 1), (2, 1, 4)])
def test_losses_of_manual_optimization_count_by_their_weights(quiet_trainer, sizes, as_tensor):
    module = ByHand(as_tensor, sizes)
    quiet_trainer(max_epochs=1).fit(module, numbers())
    first = [end - size for end, size in zip(module.ends, sizes, strict=True)]
    assert module.steps == [mean(*range(a + 1, b + 1)) for a, b in zip(first, module.ends, strict=True)]


def test_clipping_by_hand_takes_the_gradient_of_the_mean(quiet_trainer):
    class Clips(ByHand):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.clipped = None

        def training_step(self, batch, batch_idx):
            outputs = Weighted.training_step(self, batch, batch_idx)
            self.manual_backward(outputs["loss"], weight=outputs["weight"])
            if batch_idx + 1 in self.ends:
                self.clip_gradients(self.optimizers(), 3.0)
                self.optimizers().step()
                self.optimizers().zero_grad()

    module = Clips()
    quiet_trainer(max_epochs=1).fit(module, numbers())
    assert module.steps == [mean(1, 2, 3), pytest.approx(3), pytest.approx(3)]  # of 1.2, 4.4 and 7


def test_a_resume_between_manual_backward_passes_goes_on_with_their_weights(quiet_trainer, tmp_path):
    for after in (1, 2):
        path = tmp_path / str(after)
        quiet_trainer(max_epochs=1, callbacks=SaveAfter(3 + after, path)).fit(ByHand(), numbers())
        resumed = ByHand()
        quiet_trainer(max_epochs=1).fit(resumed, numbers(), ckpt_path=path)
        assert resumed.steps == [mean(4, 5, 6), mean(7)]


class TwoParts(Weighted):
    """Each of two layers has an optimizer; the gradient of a batch is its number, or the double of it."""

    def __init__(self, style):
        super().__init__()
        self.automatic_optimization = False
        self.style, self.second = style, nn.Linear(1, 1, bias=False)
        self.gradients = {0: [], 1: []}

    def training_step(self, batch, batch_idx):
        number = int(batch[0])
        both = self.optimizers()
        if self.style == "together":
            self.manual_backward((self.layer(batch[0]) + 2 * self.second(batch[0])).mean(), weight=WEIGHTS[number])
            if batch_idx % 2:
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
            return
        for index, layer in enumerate((self.layer, self.second)):
            if self.style == "toggled":
                self.toggle_optimizer(both[index])
            elif self.style == "cleared":
                both[index].zero_grad()
            loss = ((index + 1) * layer(batch[0]) + 0 * self.layer(batch[0])).mean()
            self.manual_backward(loss, weight=WEIGHTS[number] if index == 0 else 5 - index)
            both[index].step()
            if self.style == "toggled":
                both[index].zero_grad()
                self.untoggle_optimizer(both[index])

    def on_before_optimizer_step(self, optimizer):
        index = self.trainer.optimizers.index(optimizer)
        self.gradients[index].append((self.layer, self.second)[index].weight.grad.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (self.layer, self.second)]


@pytest.mark.parametrize("style", ["toggled", "cleared"])
def test_losses_of_one_optimizer_do_not_weigh_in_the_step_of_another(quiet_trainer, style):
    module = TwoParts(style)
    quiet_trainer(max_epochs=1).fit(module, numbers())
    assert module.gradients == {0: [1, 2, 0, 4, 5, 6, 7], 1: [2, 4, 6, 8, 10, 12, 14]}


def test_a_loss_weighs_in_the_steps_of_all_its_optimizers(quiet_trainer):
    module = TwoParts("together")
    quiet_trainer(max_epochs=1).fit(module, numbers(6))
    groups = [mean(1, 2), mean(3, 4), mean(5, 6)]
    assert module.gradients[0] == groups
    assert [gradient / 2 for gradient in module.gradients[1]] == groups


def test_weights_with_gradients_of_an_earlier_step_are_an_error(quiet_trainer):
    with pytest.raises(MisuseError, match=r"optimizers\(\)\[1\] has gradients from before the step of another"):
        quiet_trainer(max_epochs=1).fit(TwoParts("neither"), numbers())


def test_manual_backward_with_and_without_a_weight_is_an_error(quiet_trainer):
    class Lacks(ByHand):
        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch[0]).mean(), **({} if batch_idx else {"weight": 1}))

    with pytest.raises(MisuseError, match="manual_backward got no weight with the loss of batch 1, and one with those"):
        quiet_trainer(max_epochs=1).fit(Lacks(), numbers())


# Errors


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([1, None], "training_step returned no weight with the loss of batch 1, and one with those of earlier batches"),
        ([None, 1], "training_step returned a weight with the loss of batch 1, and none with those of earlier batches"),
        ([-1], "the weight of a loss is -1: give the number of labels or samples"),
        (["2"], "the weight of a loss is '2': give the number of labels or samples"),
        ([math.nan], "the weight of a loss is nan"),
        ([torch.ones(2)], r"the weight of a loss is tensor of shape \(2,\)"),
    ],
)
def test_a_weight_that_makes_no_mean_is_an_error(quiet_trainer, outputs, message):
    class Returns(Weighted):
        def training_step(self, batch, batch_idx):
            return {"loss": self.layer(batch[0]).mean(), "weight": outputs[batch_idx]}

    with pytest.raises(MisuseError, match=message):
        quiet_trainer(max_epochs=1).fit(Returns(), numbers())


def test_a_rank_without_a_weight_fails_before_it_communicates(quiet_trainer, averaging):
    class Lacks(Weighted):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            return outputs if self.trainer.is_global_zero else outputs["loss"]

    with pytest.raises(RankFailedError, match="no weight with the loss of batch 0 on rank 1 of 2, and one with those"):
        quiet_trainer(strategy=averaging(), devices=2, max_epochs=1).fit(Lacks(), numbers())


def test_a_strategy_that_cannot_weigh_losses_says_so(quiet_trainer):
    class Votes(SingleDeviceStrategy):
        weighs_losses = False

    with pytest.raises(
        ConflictError, match="batch 0, and Votes cannot weigh losses as it is set up, since it does not"
    ):
        quiet_trainer(strategy=Votes(), max_epochs=1).fit(Weighted(), numbers())


# Cost


@pytest.mark.parametrize(("accumulate", "reduced", "scaled"), [(1, 6, 0), (3, 4, 2), (4, 4, 2)])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_weights_are_reduced_and_those_of_several_batches_scale(
    quiet_trainer, accumulate, reduced, scaled, is_weighted
):
    calls = Counter()

    class Counting(SingleDeviceStrategy):
        def mean_weight(self, weight):
            calls["reduced"] += 1
            return super().mean_weight(weight)

        def scale_gradients(self, optimizer, factor):
            calls["scaled"] += 1
            super().scale_gradients(optimizer, factor)

    class Plain(Weighted):
        def training_step(self, batch, batch_idx):
            outputs = super().training_step(batch, batch_idx)
            return outputs if is_weighted else self.layer(batch[0]).mean()

    quiet_trainer(strategy=Counting(), max_epochs=1, accumulate_grad_batches=accumulate).fit(Plain(), numbers(6))
    assert (calls["reduced"], calls["scaled"]) == ((reduced, scaled) if is_weighted else (0, 0))


# Nothing is read from a device: a tensor on the meta device has no value


def test_weights_on_a_device_are_not_read():
    device = torch.device("meta")
    weights = LossWeights(SimpleNamespace(root_device=device, mean_weight=torch.clone))
    for is_first in (True, False):
        loss = weights.scale(torch.ones((), device=device), torch.ones((), device=device), is_first=is_first)
        assert loss.device == device
    assert weights.correction().device == device


@pytest.mark.parametrize("value", [2.0, torch.ones((), device="meta")])
def test_weights_of_logged_values_are_not_read(value):
    defaults = dict.fromkeys(Options._fields)
    options = Options(**{**defaults, "reduce_fx": "mean", "on_epoch": True, "on_step": True, "sync_dist": True})
    entry = NumberEntry("loss", options, in_step=True, training=True)
    for _ in range(2):
        entry.take(value, None)
        entry.weigh(entry.latest, torch.ones((), device="meta"))
    assert entry.epoch_share.weight.is_meta
    assert entry.step_share.weight.is_meta
