"""Resumes that bug reports of other trainers are about, one in each test."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dstrat import ModelCheckpoint, TrainModule


class Recorded(TrainModule):
    """Records its steps, and the first value of each training batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.steps, self.values = [], []

    def training_step(self, batch, batch_idx):
        self.steps.append(f"train {batch_idx}")
        self.values.append(float(batch[0, 0]))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.steps.append(f"validate {batch_idx}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0).view(2, 4))


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.rand(4)


def numbers(count=8):
    return torch.arange(4.0 * count).view(count, 4)


@pytest.fixture
def run(quiet_trainer, tmp_path):
    """Fit a new module, with a checkpoint after each step in a folder, and return the module."""

    def run_(folder, train, val=None, *, seed=0, ckpt_path=None, **options):
        module, callback = (
            Recorded(),
            ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1, every_n_train_steps=1),
        )
        torch.manual_seed(seed)
        trainer = quiet_trainer(callbacks=callback, num_sanity_val_steps=0, **options)
        trainer.fit(module, train, val, ckpt_path=None if ckpt_path is None else tmp_path / ckpt_path)
        return module

    return run_


# Lightning 20277 and 11504
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_resume_adds_no_validation(run, step):
    loaders = DataLoader(numbers(4)), DataLoader(numbers(1))
    whole = run("whole", *loaders, val_check_interval=2, max_epochs=2)
    resumed = run("resumed", *loaders, val_check_interval=2, max_epochs=2, ckpt_path=f"whole/step={step}.ckpt")
    # The checkpoint of a step is complete before its validation, which belongs to the resumed run.
    assert resumed.steps == whole.steps[-len(resumed.steps) :]
    assert sum(name.startswith("train") for name in resumed.steps) == 8 - step


# Lightning 20565
def test_a_validation_set_without_a_length_may_be_resumed_with(run):
    loaders = DataLoader(Stream()), DataLoader(Stream())
    whole = run("whole", *loaders, max_epochs=2)
    assert run("resumed", *loaders, max_epochs=2, ckpt_path="whole/step=2.ckpt").steps == whole.steps[2:]


# Accelerate 2016 and 4195, KempnerForge 57
def test_two_resumes_within_one_epoch_keep_the_order(run):
    loader = DataLoader(numbers(), shuffle=True)
    whole = run("whole", loader, max_epochs=3, seed=1)
    first = run("first", loader, max_epochs=3, max_steps=13, seed=2, ckpt_path="whole/step=10.ckpt")
    second = run("second", loader, max_epochs=3, seed=3, ckpt_path="first/step=13.ckpt")
    assert first.values + second.values == whole.values[10:]
    assert torch.equal(second.layer.weight, whole.layer.weight)


# transformers 46628
def test_random_augmentations_continue_after_a_resume(run):
    loader = DataLoader(Augmented(), shuffle=True)
    whole = run("whole", loader, max_epochs=2, seed=1)
    assert run("resumed", loader, max_epochs=2, seed=2, ckpt_path="whole/step=3.ckpt").values == whole.values[3:]
