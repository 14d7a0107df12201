"""An optimizer step is the mean of the batches that are in it, also in groups of fewer batches than usual."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dstrat import Callback, GradientAccumulationScheduler, TrainModule


class Sum(TrainModule):
    """The gradient of a batch is its number."""

    def __init__(self, without_loss=()):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.without_loss = without_loss
        self.steps = []

    def training_step(self, batch, batch_idx):
        (value,) = batch
        return None if int(value) in self.without_loss else self.layer(value).mean()

    def on_before_optimizer_step(self, optimizer):
        self.steps.append(self.layer.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Stream(IterableDataset):
    """Batches in lists, of unknown number."""

    def __iter__(self):
        return ([torch.tensor([float(number)])] for number in range(1, 8))


class SaveAfter(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, batch, path):
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen == self.batch:
            trainer.save_checkpoint(self.path)


def numbers(count, **options):
    return DataLoader(TensorDataset(torch.arange(1.0, count + 1).view(-1, 1)), **options)


def mean(*values):
    return pytest.approx(sum(values) / len(values))


def fit(quiet_trainer, loader, module=None, ckpt_path=None, **options):
    """Return the gradients of the optimizer steps."""
    module = module or Sum()
    quiet_trainer(max_epochs=1, **options).fit(module, loader, ckpt_path=ckpt_path)
    return module.steps


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        (1, 4, [(4, 5, 6, 7), (8, 9, 10)]),
        (1, 2, [(4, 5), (6, 7), (8, 9), (10,)]),
        (4, 2, [(1, 2, 3, 4), (5, 6), (7, 8), (9, 10)]),  # the group of three is complete with the next batch
        (4, 1, [(1, 2, 3, 4), (5,), (6,), (7,), (8,), (9,), (10,)]),
        (2, 4, [(3, 4, 5, 6), (7, 8, 9, 10)]),
        (4, 4, [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10)]),
        (4, 100, [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)]),
    ],
)
def test_a_resume_may_accumulate_other_numbers_of_batches(quiet_trainer, tmp_path, before, after, groups):
    path = tmp_path / "saved"
    fit(quiet_trainer, numbers(10), callbacks=SaveAfter(3, path), accumulate_grad_batches=before)
    steps = fit(quiet_trainer, numbers(10), ckpt_path=path, accumulate_grad_batches=after)
    assert steps == [mean(*group) for group in groups]


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 1e6}])
def test_the_last_group_of_a_stream_is_the_mean_of_its_batches(quiet_trainer, options):
    steps = fit(quiet_trainer, DataLoader(Stream(), batch_size=None), **options, accumulate_grad_batches=3)
    assert steps == [mean(1, 2, 3), mean(4, 5, 6), mean(7)]


@pytest.mark.parametrize(
    ("skipped", "groups"),
    [
        ((2,), [(1, 3), (4, 5, 6), (7,)]),
        ((1, 6), [(2, 3), (4, 5), (7,)]),
        ((3, 4), [(1, 2), (5, 6), (7,)]),
        ((1, 2, 3), [(4, 5, 6), (7,)]),
        ((7,), [(1, 2, 3), (4, 5, 6)]),
        ((2, 3, 5, 6), [(1,), (4,), (7,)]),
    ],
)
@pytest.mark.parametrize("is_batch", [True, False], ids=["batch", "loss"])
def test_a_group_without_some_of_its_batches_is_the_mean_of_the_others(quiet_trainer, skipped, groups, is_batch):
    def collate(samples):
        batch = torch.utils.data.default_collate(samples)
        return None if int(batch[0]) in skipped else batch

    loader = numbers(7, **({"collate_fn": collate} if is_batch else {}))
    module = Sum(without_loss=() if is_batch else skipped)
    steps = fit(quiet_trainer, loader, module, accumulate_grad_batches=3)
    assert steps == [mean(*group) for group in groups]


def test_a_limit_of_batches_ends_the_last_group(quiet_trainer):
    steps = fit(quiet_trainer, numbers(10), limit_train_batches=5, accumulate_grad_batches=3)
    assert steps == [mean(1, 2, 3), mean(4, 5)]


def test_a_group_that_max_steps_or_a_stop_ends_is_begun_anew_by_the_next_fit(quiet_trainer):
    class StopsWithinGroup(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 3

    module = Sum()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=3, callbacks=StopsWithinGroup())
    trainer.fit(module, numbers(7))
    assert module.steps == [mean(1, 2, 3)]
    module.steps.clear()
    quiet_trainer(max_epochs=1, accumulate_grad_batches=3).fit(module, numbers(7))
    assert module.steps == [mean(1, 2, 3), mean(4, 5, 6), mean(7)]


def test_a_resume_in_an_epoch_of_another_accumulation_keeps_the_begun_group(quiet_trainer, tmp_path):
    schedule = GradientAccumulationScheduler({0: 2, 1: 4})
    path = tmp_path / "saved"
    module = Sum()
    quiet_trainer(max_epochs=2, callbacks=[schedule, SaveAfter(8, path)]).fit(module, numbers(5))
    expected = [mean(1, 2), mean(3, 4), mean(5), mean(1, 2, 3, 4), mean(5)]
    assert module.steps == expected
    resumed = Sum()
    schedule = GradientAccumulationScheduler({0: 2, 1: 4})
    quiet_trainer(max_epochs=2, callbacks=[schedule]).fit(resumed, numbers(5), ckpt_path=path)
    assert resumed.steps == expected[3:]


class Grows(Callback):
    """Accumulates more batches from the fourth one on."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        trainer.accumulate_grad_batches = 2 if batch_idx < 3 else 3


def test_another_number_within_an_epoch_counts_from_the_next_group_on(quiet_trainer):
    steps = fit(quiet_trainer, numbers(8), callbacks=[Grows()], accumulate_grad_batches=2)
    assert steps == [mean(1, 2), mean(3, 4), mean(5, 6, 7), mean(8)]
