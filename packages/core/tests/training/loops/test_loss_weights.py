"""Losses with weights: an optimizer step is that of their weighted mean, and logged values have the same weights."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, TrainModule
from dstrat.builtin.precision.mixed import MixedPrecision
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
        nothing = nn.functional.cross_entropy(self.layer(batch[0]).expand(1, 2), torch.tensor([-100]))
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
    precision = MixedPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
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
    from dstrat.builtin.single_device import SingleDeviceStrategy

    class Votes(SingleDeviceStrategy):
        weighs_losses = False

    with pytest.raises(
        ConflictError, match="batch 0, and Votes cannot weigh losses as it is set up, since it does not"
    ):
        quiet_trainer(strategy=Votes(), max_epochs=1).fit(Weighted(), numbers())


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
