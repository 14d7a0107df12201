"""A rank without any batch, where the steps of the others communicate: a right result, or an error that says it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dstrat import TrainModule
from dstrat.errors import MisuseError

REPLICAS = ["ddp", "bagua", *(["deepspeed_stage_2"] if find_spec("deepspeed") else [])]
SHARDS = ["fsdp", "model_parallel", "mesh", *(["deepspeed_stage_3"] if find_spec("deepspeed") else [])]


class Gathering(TrainModule):
    """Gathers its loss in each validation step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        loss = self.training_step(batch, batch_idx)
        self.all_gather(loss)
        self.log("loss", loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Stream(IterableDataset):
    """Two samples of rank 0."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter([torch.ones(4)] * 2 * (self.rank == 0))


def make(strategy):
    """Return a strategy to pass to the Trainer, which shards over all ranks."""
    if strategy != "model_parallel":
        return strategy
    from dstrat_fsdp import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


def validated(cluster, strategy):
    """Return the loss of one sample in the validation of two ranks."""
    trainer = quiet_trainer(make(strategy), cluster, num_sanity_val_steps=0)
    trainer.fit(Gathering(), DataLoader(torch.ones(4, 4)), DataLoader(torch.full((1, 4), 2.0)))
    return float(trainer.callback_metrics["loss"])


def test_a_rank_without_batches_takes_part_in_steps_of_sharded_modules():
    for found in in_ranks(each, function=validated, cases={name: {"strategy": name} for name in SHARDS}):
        assert found == dict.fromkeys(SHARDS, 8.0)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_steps_of_replicas_that_wait_for_a_rank_without_batches_are_an_error(strategy):
    with pytest.raises(pytest.fail.Exception, match="another rank has no batch, so that it does not run validation_s"):
        in_ranks(validated, strategy=strategy)


def trained(cluster, strategy):
    """Return the message of the error of a training in which rank 1 has no batch."""
    stream = DataLoader(Stream(cluster.global_rank), batch_size=1)
    with pytest.raises(MisuseError) as raised:
        quiet_trainer(make(strategy), cluster).fit(Gathering(), stream)
    return str(raised.value)


def test_a_training_in_which_one_rank_has_no_batch_is_an_error_on_all_ranks():
    strategies = REPLICAS + SHARDS
    for found in in_ranks(each, function=trained, cases={name: {"strategy": name} for name in strategies}):
        assert list(found) == strategies
        assert all("the training loader (a ShortestLoader) gave no batch" in message for message in found.values())
