"""Schedulers that monitor a value step alike on all ranks, also by a value that is not reduced."""

from __future__ import annotations

import torch
from tests.ranks import each, in_ranks
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, TrainModule
from dstrat.errors import MisuseError


class Averaging(GradientSyncStrategy):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Net(TrainModule):
    """Logs a value of rank 0 that stays, and one of rank 1 that improves."""

    def __init__(self, interval, logging_rank=None, strict=True):
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.interval, self.logging_rank, self.strict = interval, logging_rank, strict

    def training_step(self, batch, batch_idx):
        rank, step = self.trainer.global_rank, self.trainer.fit_loop.batches_seen
        if self.logging_rank in (None, rank):
            self.log("value", 1.0 if rank == 0 else 10.0 / (step + 1), on_epoch=False)
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        config = {"scheduler": plateau, "monitor": "value", "interval": self.interval, "strict": self.strict}
        return {"optimizer": optimizer, "lr_scheduler": config}


def rate(cluster, max_epochs, **options):
    module = Net(**options)
    trainer = quiet_trainer(Averaging(), cluster, max_epochs=max_epochs)
    try:
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(6, 1)), batch_size=1))
    except MisuseError as error:
        return str(error)
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_all_ranks_have_the_learning_rate_by_the_value_of_rank_0():
    cases = {
        "steps": {"interval": "step", "max_epochs": 1},
        "epochs": {"interval": "epoch", "max_epochs": 3},
        "only rank 1 logs": {"interval": "step", "max_epochs": 1, "logging_rank": 1, "strict": False},
    }
    one, other = in_ranks(each, function=rate, cases=cases)
    assert one == other == {"steps": 0.25, "epochs": 0.25, "only rank 1 logs": 1.0}


def test_a_value_that_rank_0_does_not_log_is_an_error_on_all_ranks():
    cases = {"missing": {"interval": "step", "max_epochs": 1, "logging_rank": 1}}
    for rank in in_ranks(each, function=rate, cases=cases):
        assert "'value', which was not logged by rank 0, whose value all ranks take; logged were" in rank["missing"]
