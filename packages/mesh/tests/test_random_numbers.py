"""Random numbers of ranks that share a batch: those of data are the same, whatever each rank draws elsewhere."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dstrat import TrainModule, seed_everything
from dstrat.interfaces.pipeline import Pipeline
from dstrat_mesh import MeshStrategy

BATCHES, EPOCHS = 6, 2


class Noisy(Dataset):
    """Adds noise to a sample as it is read: inputs and targets have the same."""

    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        sample = index + torch.randn(6) + random.random() + np.random.random()
        return sample, sample[:3]


class OfRank(Noisy):
    """Has other samples in each rank."""

    def __getitem__(self, index):
        sample = torch.full((6,), float(index + dist.get_rank()))
        return sample, sample[:3]


class Recorded(nn.Module):
    """Drops in evaluations, too, and keeps the places that it has dropped."""

    def __init__(self):
        super().__init__()
        self.dropped = []

    def forward(self, values):
        output = nn.functional.dropout(values, 0.5)
        self.dropped.append((output == 0).flatten().tolist())
        return output


class Net(TrainModule):
    """Has dropout in the first of two stages, or in both."""

    def __init__(self, save_to=None, in_both=False):
        super().__init__()
        torch.manual_seed(0)
        second = Recorded() if in_both else nn.Identity()
        layers = [nn.Linear(6, 16), Recorded(), nn.Linear(16, 16), nn.Linear(16, 16), second, nn.Linear(16, 3)]
        self.net = nn.Sequential(*layers)
        self.save_to, self.batches, self.losses, self.drawn = save_to, [], [], []

    def configure_pipeline(self):
        def inputs(batch):
            self.drawn.append(float(torch.rand(())))
            return batch[0] + self.drawn[-1]

        def loss(output, batch):
            return nn.functional.mse_loss(output, batch[1])

        return Pipeline(model=self.net, inputs=inputs, loss=loss)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append(batch[1].tolist())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        if batch_idx == 2 and self.trainer.current_epoch == 0 and self.save_to is not None:
            self.trainer.save_checkpoint(self.save_to)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit(cluster, save_to=None, ckpt_path=None, in_both=False, data_class=Noisy, seed=3):
    seed_everything(seed, verbose=False)
    net = Net(save_to, in_both)
    trainer = quiet_trainer(
        MeshStrategy(pp=2),
        devices=cluster.world_size,
        max_epochs=EPOCHS,
        plugins=[cluster],
        num_sanity_val_steps=0,
        val_check_interval=3,
    )
    loaders = [DataLoader(data_class(), batch_size=4, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(net, *loaders, ckpt_path=ckpt_path)
    dropped = [places for layer in net.net if isinstance(layer, Recorded) for places in layer.dropped]
    return {"batches": net.batches, "losses": net.losses, "drawn": net.drawn, "dropped": dropped}


def test_stages_read_the_same_data_where_one_of_them_has_dropout():
    first, last = in_ranks(fit)
    assert first["batches"] == last["batches"]
    assert len(first["batches"]) == EPOCHS * BATCHES
    assert len({str(batch) for batch in first["batches"]}) == EPOCHS * BATCHES
    assert first["dropped"]
    assert not last["dropped"]


def test_stages_draw_the_same_for_inputs_and_others_in_their_layers():
    first, last = in_ranks(fit, in_both=True)
    assert first["drawn"] == last["drawn"]
    assert len(set(first["drawn"])) == len(first["drawn"])
    dropped = first["dropped"] + last["dropped"]
    assert len({str(places) for places in dropped}) == len(dropped) > 0


def seeded_by_rank(cluster):
    return fit(cluster, seed=cluster.global_rank)["batches"]


def test_ranks_that_have_drawn_other_numbers_before_read_the_same_data():
    first, last = in_ranks(seeded_by_rank)
    assert first == last
    assert len({str(batch) for batch in first}) == EPOCHS * BATCHES


def refused(cluster):
    with pytest.raises(Exception) as error:  # the others lose the connection to the first one
        fit(cluster, data_class=OfRank)
    return str(error.value)


def test_a_dataset_with_other_samples_in_each_rank_is_an_error():
    message, _ = in_ranks(refused)
    assert message.startswith("rank 1 has loaded another batch 1 of training_step than rank 0, with which it shares")
    assert "divide data by strategy.distributed_sampler_kwargs" in message


def with_column(samples):
    inputs = torch.stack([sample for sample, _ in samples])
    return inputs, inputs[:, :3], torch.zeros(2 * len(samples), 1)[::2]


def fitted(cluster):
    trainer = quiet_trainer(MeshStrategy(pp=2), cluster, max_steps=1)
    trainer.fit(Net(), DataLoader(Noisy(), batch_size=4, collate_fn=with_column))
    return trainer.global_step


def test_batches_with_a_column_that_has_a_stride_are_compared():
    assert in_ranks(fitted) == [1, 1]


def validate(cluster):
    trainer = quiet_trainer(MeshStrategy(pp=2), devices=cluster.world_size, plugins=[cluster], limit_val_batches=1)
    trainer.validate(Net(), DataLoader(OfRank(), batch_size=4))


def test_other_samples_in_the_only_batch_of_an_evaluation_are_an_error():
    with pytest.raises(pytest.fail.Exception, match="rank 1 has loaded another batch 1 of validation_step than rank 0"):
        in_ranks(validate, may_die=(1,))


def test_a_resumed_training_draws_what_one_that_never_stopped_draws(tmp_path):
    path = str(tmp_path / "middle")
    whole = in_ranks(fit, save_to=path, in_both=True)
    resumed = in_ranks(fit, ckpt_path=path, in_both=True)
    for through, later in zip(whole, resumed, strict=True):
        for name, values in later.items():
            assert values == through[name][-len(values) :], name
        assert len(later["losses"]) == EPOCHS * BATCHES - 3
