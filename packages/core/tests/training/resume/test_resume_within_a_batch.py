"""What goes on from a checkpoint that is saved within a batch, within validation or where an epoch is broken off."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, EarlyStopping, ModelCheckpoint, TrainModule

BATCHES = 5  # of an epoch
WITHIN_A_BATCH = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
]
AROUND_VALIDATION = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
]


class Net(TrainModule):
    """Draws random numbers in validation only, so that a batch that is trained on again gives the same."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0] + torch.rand(1).to(batch[0])), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saving(Callback):
    """Saves the first time that a hook is called after so many batches."""

    saves_checkpoints = True

    def __init__(self, path, hook, at):
        self.path, self.at = path, at
        setattr(self, hook, self.save)

    def save(self, trainer, *_):
        if trainer.fit_loop.batches_seen == self.at and not trainer.sanity_checking and not self.path.exists():
            trainer.save_checkpoint(self.path)


class KnowsItsPlace:
    """A loader that says where it is, in which the batches that it has given count."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return BATCHES

    def __iter__(self):
        self.given %= BATCHES
        while self.given < BATCHES:
            self.given += 1
            yield numbers()[4 * self.given - 4 : 4 * self.given]

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def numbers():
    x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture
def fit(quiet_trainer):
    def run(*callbacks, cls=Net, loader=None, ckpt_path=None, **options):
        torch.manual_seed(0 if ckpt_path is None else 1)
        module = cls()
        trainer = quiet_trainer(**{"max_epochs": 2, "val_check_interval": 2, **options}, callbacks=list(callbacks))
        trainer.fit(
            module,
            loader or DataLoader(numbers(), batch_size=4, shuffle=True),
            DataLoader(numbers(), batch_size=8),
            ckpt_path=ckpt_path,
        )
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        return trainer.global_step, values, [parameter.tolist() for parameter in module.parameters()]

    return run


def whole_and_resumed(fit, path, hook, *, at, loader=None, **options):
    """Return what a run comes to that saves on the way, and what one comes to that goes on from there."""
    whole = fit(Saving(path, hook, at), loader=loader and loader(), **options)
    return whole, fit(ckpt_path=path, loader=loader and loader(), **options)


@pytest.mark.parametrize("at", [0, 1, 4])  # the first and the last batch of an epoch
@pytest.mark.parametrize("hook", WITHIN_A_BATCH)
def test_a_batch_within_which_was_saved_is_trained_on_once_more(fit, tmp_path, hook, at):
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", hook, at=at)
    assert resumed == whole


@pytest.mark.parametrize("hook", WITHIN_A_BATCH)
def test_a_loader_that_knows_its_place_gives_that_batch_again(fit, tmp_path, hook):
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", hook, at=2, loader=KnowsItsPlace)
    assert resumed == whole


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_gradients_of_earlier_batches_of_its_group_are_kept(fit, tmp_path, hook):
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", hook, at=1, accumulate_grad_batches=2)
    assert resumed == whole


def test_gradients_with_a_part_of_the_batch_in_them_are_left_out(fit, tmp_path, caplog):
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", "on_after_backward", at=1, accumulate_grad_batches=2)
    assert resumed[0] == whole[0]
    assert resumed != whole
    assert "was saved between the batches of one optimizer step, which are left out" in caplog.text


@pytest.mark.parametrize("hook", AROUND_VALIDATION)
def test_a_validation_within_which_was_saved_is_done_once_more_and_no_other(fit, tmp_path, hook):
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", hook, at=2)
    assert resumed == whole


def test_a_checkpoint_of_the_end_of_the_sanity_check_goes_on_like_the_run_that_saved_it(fit, tmp_path):
    saving = Saving(tmp_path / "saved", "on_sanity_check_end", 0)
    saving.save = lambda trainer, *_: trainer.save_checkpoint(saving.path)
    saving.on_sanity_check_end = saving.save
    whole = fit(saving, num_sanity_val_steps=1)
    assert fit(ckpt_path=saving.path) == whole


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_after_an_exception_in_a_batch_training_goes_on_with_that_batch(fit, tmp_path, accumulate_grad_batches):
    class Raises(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.fit_loop.batches_seen == 3:
                raise ValueError("no memory")
            return super().training_step(batch, batch_idx)

    whole = fit(accumulate_grad_batches=accumulate_grad_batches)
    rescue = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(ValueError, match="no memory"):
        fit(rescue, cls=Raises, accumulate_grad_batches=accumulate_grad_batches)
    path = tmp_path / "on_exception.ckpt"
    assert fit(ckpt_path=path, accumulate_grad_batches=accumulate_grad_batches) == whole


class Accumulating(Net):
    """Steps its optimizer in every second batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_gradients_of_a_batch_that_is_trained_on_once_more_count_once_in_manual_optimization(fit, tmp_path):
    options = {"cls": Accumulating, "val_check_interval": 1.0}
    whole, resumed = whole_and_resumed(fit, tmp_path / "saved", "on_after_backward", at=2, **options)
    assert resumed == whole


def test_means_go_on_over_an_epoch_that_was_broken_off_and_early_stopping_judges_only_its_whole(fit, tmp_path):
    def watched(stopping, **options):
        saves = ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
        return (*fit(stopping, saves, **options), stopping.state_dict())

    whole = watched(EarlyStopping("loss_epoch", patience=1))
    (tmp_path / "checkpoints").rename(tmp_path / "whole")
    stopping = EarlyStopping("loss_epoch", patience=1)
    watched(stopping, max_steps=7)
    assert stopping.wait_count == 0
    assert watched(EarlyStopping("loss_epoch", patience=1), ckpt_path=tmp_path / "checkpoints" / "last") == whole


def test_a_resume_within_the_last_batch_ends_its_epoch(quiet_trainer, line_class, loader, tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "last.ckpt")

        def on_train_epoch_end(self, trainer, module):
            ended.append(trainer.current_epoch)

    ended = []
    trainer = quiet_trainer(max_epochs=2, max_steps=6, callbacks=Saving())
    trainer.fit(line_class(), loader())
    assert (ended, trainer.current_epoch) == ([0], 1)
    resumed = quiet_trainer(max_epochs=2, max_steps=6, callbacks=Saving())
    resumed.fit(line_class(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert (ended, resumed.current_epoch, resumed.global_step) == ([0, 0], 1, 6)
