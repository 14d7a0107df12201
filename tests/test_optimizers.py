"""An optimizer of torch gives under each strategy what it gives on one device, or an error before the start."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from tests.ranks import in_ranks
from tests.trainer_runs import Losses, Saves, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import SingleDeviceStrategy, TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.errors import DstratError
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy

STEPS, SAVED_AT, GLOBAL_BATCH = 6, 3, 12

OPTIMIZERS = {
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "Adam": {"lr": 0.02, "amsgrad": True},
    "AdamW": {"lr": 0.02},
    "Adamax": {"lr": 0.02},
    "ASGD": {"lr": 0.05, "t0": 2.0},
    "LBFGS": {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.02},
    "RAdam": {"lr": 0.02},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "Rprop": {"lr": 0.02},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {"lr": 0.02},
}


class Net(TrainModule):
    """Has two groups of parameters, of odd sizes, whose rates a scheduler changes in each step."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.first, self.second = nn.Linear(6, 7, bias=False), nn.Linear(7, 3, bias=False)
        self.third = nn.Linear(3, 1, bias=False)

    def training_step(self, batch, batch_idx):
        found = self.third(torch.tanh(self.second(torch.tanh(self.first(batch[0])))))
        return nn.functional.mse_loss(found, batch[1])

    def configure_optimizers(self):
        *others, last = self.parameters()
        options = OPTIMIZERS[self.name]
        groups = [{"params": others}, {"params": [last], "lr": options["lr"] / 2}]
        if self.name == "LBFGS":  # which has one group
            groups = [*others, last]
        optimizer = getattr(torch.optim, self.name)(groups, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SparseNet(Net):
    """Has gradients of some rows of tables only."""

    def __init__(self, name):
        super().__init__(name)
        del self.first, self.second, self.third
        self.first, self.second = (nn.EmbeddingBag(7, 3, sparse=True) for _ in range(2))

    def training_step(self, batch, batch_idx):
        rows = (batch[0] * 3).long() % 7
        return (self.first(rows) * self.second(rows)).sum(1, keepdim=True).sub(batch[1]).square().mean()


def fit(make, cluster, name, folder, *, ckpt_path=None, callbacks=()):
    losses = Losses()
    trainer = quiet_trainer(
        make(),
        cluster,
        plugins=[PortableCheckpointIO()],
        callbacks=[losses, *callbacks],
        default_root_dir=folder,
        precision="64-true"
        if name == "LBFGS" and make in (SingleDeviceStrategy, DDPStrategy)
        else None,  # it amplifies rounding
    )
    inputs = torch.randn(STEPS * GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :1] * inputs[:, 1:2])
    batch = GLOBAL_BATCH // (1 if cluster is None else cluster.world_size)
    module = (SparseNet if name == "SparseAdam" else Net)(name)
    trainer.fit(module, DataLoader(data, batch_size=batch), ckpt_path=ckpt_path)
    return losses.losses


def outcome(make, cluster, name, folder):
    """Return the losses of a whole run, and those of one that goes on in its middle; or the error."""
    print("with", name)
    try:
        whole = fit(make, cluster, name, folder, callbacks=[Saves(folder / name, (SAVED_AT,))])
    except DstratError as error:
        return str(error)
    return whole, fit(make, cluster, name, folder, ckpt_path=folder / name / str(SAVED_AT))


def zero(stage):
    from dstrat_deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=stage)


STRATEGIES = {
    "DDPStrategy": DDPStrategy,
    "FSDPStrategy": FSDPStrategy,
    **{f"stage {stage}": partial(zero, stage) for stage in range(4) if find_spec("deepspeed")},
}
NEEDS_WHOLE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
REFUSED = {
    "FSDPStrategy": NEEDS_WHOLE | {"Rprop"},
    "stage 0": {"LBFGS"},
    **{f"stage {stage}": NEEDS_WHOLE for stage in (1, 2, 3)},
}
NAMED_BY = {"SparseAdam": "first", "LBFGS": "LBFGS"}
"""What an error says in place of the optimizer: the layer whose gradients are sparse."""


def outcomes(cluster, strategy, names, folder):
    return {name: outcome(STRATEGIES[strategy], cluster, name, folder) for name in names}


def check(strategy, names, folder):
    refused = REFUSED.get(strategy, set())
    expected = {name: fit(SingleDeviceStrategy, None, name, folder) for name in names if name not in refused}
    for found in in_ranks(outcomes, strategy=strategy, names=names, folder=folder):
        for name in refused.intersection(names):
            assert isinstance(found[name], str), name
            assert NAMED_BY.get(name, name) in found[name]
            assert strategy in found[name] or "DeepSpeed" in found[name]
        for name, losses in expected.items():
            assert not isinstance(found[name], str), found[name]
            whole, resumed = found[name]
            assert whole == pytest.approx(losses, rel=1e-6, abs=0), name
            assert resumed == whole[SAVED_AT:], name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_gives_the_losses_of_one_device_and_resumes_exactly_or_is_refused(strategy, tmp_path):
    check(strategy, ["Adagrad", "Muon", "SGD", "SparseAdam"], tmp_path)


@pytest.mark.variant
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_optimizer_of_torch_does_so(strategy, tmp_path):
    assert OPTIMIZERS.keys() == {name for name, value in vars(torch.optim).items() if is_optimizer(value)}
    check(strategy, list(OPTIMIZERS), tmp_path)


def is_optimizer(value):
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
