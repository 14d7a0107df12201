"""A step reads nothing from the device: no strategy lets the host wait, between the intervals of logging."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from tests.ranks import each, in_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, GradientSyncStrategy, OwnLoop, Trainer, TrainModule, build
from dstrat.testing.simulated_gpu import synchronizations
from dstrat_diloco import DiLoCoStrategy
from dstrat_fsdp import ModelParallelStrategy

# Steps that are watched: those before compile, allocate and agree, and ranks of a batch compare their 8th and 16th.
FIRST, LAST = 9, 14


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def loss(self, batch):
        return functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", batch[0].max(), reduce_fx="max")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class MeanOfGradients(GradientSyncStrategy):
    """A user's strategy."""

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class SplitNet(Net):
    """Its first layer is split over the ranks by columns, its second one by rows."""

    def configure_model(self):
        plan = {"layers.0": ColwiseParallel(), "layers.3": RowwiseParallel()}
        parallelize_module(self, self.device_mesh["tensor_parallel"], plan)


def split_over_ranks():
    return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)


def in_groups():
    """Return a strategy that lets another one copy the batches."""
    return DiLoCoStrategy(groups=2, every=1000)


class Watch(Callback):
    def __init__(self):
        self.waits, self._stack = [], ExitStack()

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == FIRST:
            self.waits = self._stack.enter_context(synchronizations())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if batch_idx == LAST:
            self._stack.close()


def loader():
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3]), batch_size=2)


def stacks(waits):
    """Return what waited and where, without the vote about stopping, which is every half second."""
    return [f"{wait.cause}\n{wait.stack}" for wait in waits if "training/loops/stopping.py" not in wait.stack]


def fit(cluster, strategy, **options):
    watch = Watch()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        strategy=strategy if isinstance(strategy, str) else strategy(),
        accelerator="simulated_gpu",
        devices=cluster.world_size,
        plugins=[cluster],
        callbacks=[watch],
        log_every_n_steps=1000,
        max_epochs=1,
        **quiet | options,
    )
    trainer.fit((SplitNet if strategy is split_over_ranks else Net)(), loader())
    return stacks(watch.waits)


WAYS = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "clipped by value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "in bfloat16": {"precision": "bf16-mixed"},
}


def fits(cluster, strategy):
    return each(cluster, fit, {name: {"strategy": strategy, **options} for name, options in WAYS.items()})


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp_find_unused_parameters_true", "fsdp", "mesh", "bagua", split_over_ranks, in_groups, MeanOfGradients],
    ids=lambda strategy: strategy if isinstance(strategy, str) else strategy.__name__,
)
def test_a_step_of_several_ranks_never_waits_for_the_device(strategy):
    for waits in in_ranks(fits, strategy=strategy):
        assert waits == {name: [] for name in WAYS}


def test_a_step_on_one_device_never_waits_for_it():
    assert in_ranks(fits, 1, strategy="single_device") == [{name: [] for name in WAYS}]


def own_loop(cluster, strategy):
    devices = cluster.world_size
    built = build(strategy=strategy, accelerator="simulated_gpu", devices=devices, plugins=[cluster])
    return OwnLoop(built).launch(_own_steps)


def _own_steps(loop):
    net = Net()
    loop.setup(net, lambda net: torch.optim.AdamW(net.parameters()), gradient_clip_val=0.5)
    with ExitStack() as stack:
        for index, batch in enumerate(loop.training_loader(loader())):
            if index == FIRST:
                waits = stack.enter_context(synchronizations())
            loop.backward(loop.compute(net.loss, batch))
            loop.step()
            if index == LAST:
                break
    return stacks(waits)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_of_an_own_loop_never_waits_for_the_device(strategy):
    assert in_ranks(own_loop, strategy=strategy) == [[], []]


class ReadsItsLoss(Net):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        loss.item()
        return loss


def fit_that_reads(cluster):
    watch = Watch()
    trainer = Trainer(accelerator="simulated_gpu", devices=1, plugins=[cluster], callbacks=[watch], max_epochs=1)
    trainer.fit(ReadsItsLoss(), loader())
    return stacks(watch.waits)


def test_a_step_that_reads_is_found_with_its_line():
    (waits,) = in_ranks(fit_that_reads, 1)
    assert len(waits) == LAST - FIRST + 1
    assert all(wait.startswith("item\n") and "loss.item()" in wait for wait in waits)
