"""Checkpoints within a round: exact on the same groups, and moved to other groups and strategies."""

import random
from pathlib import Path

import pytest
import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer, same_when_resumed, shuffled_loader
from torch import nn

from dstrat import TrainModule
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat_diloco import DiLoCoStrategy

BATCHES = 9  # of an epoch on each rank
EVERY = 4


class Net(TrainModule):
    """Has dropout, running statistics, and a layer that is frozen at first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))
        self.frozen = nn.Linear(6, 1).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]) + self.frozen(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Adversaries(Net):
    """Two optimizers step in turn, twice and once."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        for optimizer in (first, second) if batch_idx % 2 else (first,):
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            optimizer.step()
            first.zero_grad()
            second.zero_grad()
        return loss

    def configure_optimizers(self):
        return [
            torch.optim.AdamW(self.layers[:2].parameters(), lr=0.01),
            torch.optim.SGD(self.layers[4].parameters(), lr=0.1, momentum=0.9),
        ]


def fit(cluster, folder, *, cls=Net, io=PortableCheckpointIO, ckpt_path=None, trainer=None, callbacks=(), **options):
    fitting = quiet_trainer(
        DiLoCoStrategy(**{"every": EVERY} | options),
        cluster,
        plugins=[io()],
        default_root_dir=folder,
        callbacks=[*callbacks],
        **(trainer or {}),
    )
    module = cls()
    fitting.fit(module, shuffled_loader(2 * BATCHES * cluster.world_size, batch_size=2), ckpt_path=ckpt_path)
    values = [*module.named_parameters(), *module.named_buffers()]  # shards have no state dict after the run
    return {name: getattr(value, "_local_tensor", value).detach().clone() for name, value in values}


class Unfreezes(Net):
    """Trains the frozen layer from its sixth batch on."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if self.global_step >= 5:
            self.frozen.requires_grad_(True)


def stopped_and_resumed(cluster, folder, moments=(2, 5, 8), **options):
    def fit_anew(**more):
        return fit(cluster, folder, **options, **more)

    return same_when_resumed(fit_anew, Path(folder), moments)


TEN = random.Random(1).sample(range(1, 2 * BATCHES), 10)
ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
ON_TWO = {
    "ten random batches": {"moments": TEN, "trainer": {"max_epochs": 2}},
    "fragments in flight": {"moments": TEN, "trainer": {"max_epochs": 2}, "fragments": 2, "delay": 3},
    "compressed": {"delta_dtype": "int8", "delay": 2},
    "one file": {"io": TorchCheckpointIO, "fragments": 2},
    "accumulated and clipped": {"trainer": ACCUMULATED, "every": 2},
    "two optimizers": {"cls": Adversaries},
    "a layer that is unfrozen": {
        "cls": Unfreezes,
        "moments": TEN,
        "trainer": {"max_epochs": 2},
        "fragments": 2,
        "delay": 3,
    },
    "loss scales": {"trainer": {"precision": "16-mixed"}},
}
ON_FOUR = {
    "pairs with ddp": {"groups": 2, "fragments": 2, "delay": 1},
    "pairs with fsdp": {"groups": 2, "inner": "fsdp", "moments": TEN, "trainer": {"max_epochs": 2}},
    "pairs with fsdp, in flight": {"groups": 2, "inner": "fsdp", "fragments": 2, "delay": 3},
    "pairs with fsdp, one file": {"groups": 2, "inner": "fsdp", "io": TorchCheckpointIO},
    "pairs with fsdp, accumulated": {"groups": 2, "inner": "fsdp", "trainer": ACCUMULATED, "every": 2},
}


@pytest.mark.parametrize(("world_size", "cases"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.variant)])
def test_a_resumed_training_is_the_one_that_never_stopped(world_size, cases, tmp_path):
    for results in in_ranks(each, world_size, function=stopped_and_resumed, cases=in_folders(cases, tmp_path)):
        for name, same in results.items():
            assert same == dict.fromkeys(cases[name].get("moments", (2, 5, 8)), True), name


def in_folders(cases, tmp_path):
    return {name: {"folder": f"{tmp_path}/{name}", **options} for name, options in cases.items()}
