"""A job that joins others goes on with the state of a training that is under way."""

import copy

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule, seed_everything
from dstrat.builtin.single_device import SingleDeviceStrategy


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        inputs, indices = batch
        self.batches.append((self.trainer.current_epoch, indices.tolist()))
        return self.layer(inputs).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


class Sharing(SingleDeviceStrategy):
    """Captures the state in the backward pass of a step, and joins with a state that another one has captured."""

    def __init__(self, *, capture_at=None, joins_with=None):
        super().__init__()
        self.capture_at, self.joins_with, self.captured = capture_at, joins_with, None

    def join_training(self, training):
        self.training = training
        if self.joins_with is not None:
            training.restore(copy.deepcopy(self.joins_with))

    def backward(self, loss, *args, **kwargs):
        if len(self.module.batches) == self.capture_at:
            self.captured = copy.deepcopy(self.training.capture())
        super().backward(loss, *args, **kwargs)


class SharingHalf(Sharing):
    """Reads the second half of the training data."""

    distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012 - not changed
    training_sampler_kwargs = {"num_replicas": 2, "rank": 1}  # noqa: RUF012 - not changed


class Counter(Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def fit(strategy, seed=1):
    seed_everything(seed, verbose=False)
    net, counter = Net(), Counter()
    dataset = TensorDataset(torch.arange(48.0).view(24, 2) / 24, torch.arange(24))
    trainer = Trainer(
        strategy=strategy,
        accelerator=ACCELERATOR,
        devices=1,
        max_epochs=3,
        callbacks=[counter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(dataset, batch_size=4, shuffle=True))
    return net, trainer, counter


@pytest.mark.parametrize("capture_at", [1, 2, 5])
def test_a_training_that_joins_ends_as_the_one_that_it_has_joined(capture_at):
    first = SharingHalf(capture_at=capture_at)
    net, trainer, counter = fit(first)
    # Another seed: weights and the order of the data come from the captured state.
    joined_net, joined_trainer, joined_counter = fit(SharingHalf(joins_with=first.captured), seed=2)
    assert joined_trainer.global_step == trainer.global_step
    assert joined_counter.count == counter.count
    assert joined_net.batches == net.batches[capture_at - 1 :]
    assert all(map(torch.equal, joined_net.parameters(), net.parameters()))


def test_jobs_that_share_the_data_read_each_sample_once():
    halves = [fit(SharingHalf())[0].batches]

    class FirstHalf(SharingHalf):
        training_sampler_kwargs = {"num_replicas": 2, "rank": 0}  # noqa: RUF012 - not changed

    halves.append(fit(FirstHalf())[0].batches)
    for epoch in range(3):
        read = [index for half in halves for at, indices in half if at == epoch for index in indices]
        assert sorted(read) == list(range(24))
