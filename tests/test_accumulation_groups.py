"""An optimizer step is the mean of the batches of all ranks that are in it, with every strategy."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import Saves, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from dstrat import TrainModule

STRATEGIES = ["ddp", "fsdp", "bagua"]
if find_spec("deepspeed"):
    OFFLOADED = [f"deepspeed_stage_{stage}_offload" for stage in (2, 3)]
    STRATEGIES += [f"deepspeed_stage_{stage}" for stage in range(4)] + OFFLOADED
if find_spec("fairscale"):
    STRATEGIES += ["ddp_sharded"]


class Sum(TrainModule):
    """The gradient of a batch is the mean of its numbers, and lr is 1: the weights are minus the sum of the steps."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)  # a row for each rank
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum(1).mean()

    def on_train_end(self):
        self.weights = self.trainer.strategy.module_state_dict().get("layer.weight")  # on rank 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Stream(IterableDataset):
    """Five batches of each rank, of unknown number."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return ([torch.tensor([[float(2 * number + self.rank + 1)]])] for number in range(5))


def numbers(count):
    return DataLoader(TensorDataset(torch.arange(1.0, count + 1).view(-1, 1)), batch_size=1)


def make(strategy):
    """Return a strategy to pass to the Trainer; offloaded optimizers of DeepSpeed are its own, unless forced."""
    if not strategy.endswith("offload"):
        return strategy
    from dstrat_deepspeed import DeepSpeedStrategy

    config = {"zero_force_ds_cpu_optimizer": False}
    return DeepSpeedStrategy(stage=int(strategy.split("_")[2]), offload_optimizer=True, config=config)


def trained(cluster, strategy, loader, **options):
    """Return the weights after an epoch, on rank 0."""
    module, ckpt_path = Sum(), options.pop("ckpt_path", None)
    quiet_trainer(make(strategy), cluster, **options).fit(module, loader, ckpt_path=ckpt_path)
    return module.weights.flatten().tolist() if cluster.global_rank == 0 else [None, None]


def groups(cluster, strategy, folder):
    """Return the weights after trainings with several kinds of groups."""
    rank = cluster.global_rank
    saves = [Saves(folder / strategy, {3})]
    weights = {
        "stream": trained(cluster, strategy, DataLoader(Stream(rank), batch_size=None), accumulate_grad_batches=2),
        "clipped stream": trained(
            cluster,
            strategy,
            DataLoader(Stream(rank), batch_size=None),
            accumulate_grad_batches=2,
            gradient_clip_val=1e6,
        ),
        "whole": trained(cluster, strategy, numbers(14), accumulate_grad_batches=4, callbacks=saves),
        "resumed": trained(
            cluster, strategy, numbers(14), accumulate_grad_batches=2, ckpt_path=folder / strategy / "3"
        ),
    }
    assert all(one == other for one, other in weights.values()), weights
    return {name: one for name, (one, _) in weights.items()}


# Batches of two ranks have the samples 1 and 2, 3 and 4 ...: their means are 1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5.
RIGHT = {
    "stream": -(2.5 + 6.5 + 9.5),
    "clipped stream": -(2.5 + 6.5 + 9.5),
    "whole": -(4.5 + 11.5),
    "resumed": -(4.5 + 10.5 + 13.5),  # three batches are accumulated, and complete with the next one
}


def test_groups_of_fewer_batches_are_their_mean_with_every_strategy(tmp_path):
    cases = {strategy: {"strategy": strategy, "folder": tmp_path} for strategy in STRATEGIES}
    found, _ = in_ranks(each, function=groups, cases=cases)
    left_out = -(7.5 + 10.5 + 13.5)  # a strategy that cannot restore gradients logs that, and leaves their batches out
    for strategy, weights in found.items():
        expected = RIGHT if strategy != "ddp_sharded" else {**RIGHT, "resumed": left_out}
        assert weights == pytest.approx(expected, rel=1e-6), strategy


def resumed_alone(cluster, folder):
    return trained(cluster, "ddp", numbers(7), accumulate_grad_batches=2, ckpt_path=folder / "3")


def test_a_batch_of_one_rank_counts_as_one_in_a_group_of_two_ranks(tmp_path):
    quiet_trainer("single_device", callbacks=[Saves(tmp_path, {3})], accumulate_grad_batches=2).fit(Sum(), numbers(7))
    weights, _ = in_ranks(resumed_alone, folder=tmp_path)
    # The epoch has 7 batches for one rank and 4 for two: half the samples are not half the batches.  After 1 and 2, a
    # group has 3, and again 3 with 4; then 5, 6 and 7, with 1 as padding.
    assert weights == [pytest.approx(-(1.5 + 10 / 3 + 4.75), rel=1e-6)] * 2


def trained_from(cluster, folder):
    """Train on four samples, from the checkpoint that is there."""
    ckpt_path = folder / "1" if cluster.world_size == 3 else None
    return trained(cluster, "ddp", numbers(4), callbacks=[Saves(folder, {1})], ckpt_path=ckpt_path)


def test_no_sample_is_left_out_where_batches_of_other_numbers_of_ranks_overlap(tmp_path):
    in_ranks(trained_from, folder=tmp_path)
    weights, *_ = in_ranks(trained_from, 3, folder=tmp_path)
    # Two ranks have stepped with 1 and 2; three have 1, 2 and 3, then 4 with 1 and 2 as padding.
    assert weights == [pytest.approx(-(1.5 + 2 + 7 / 3), rel=1e-6)] * 2
