"""Reports of Lightning's tracker about resumed runs, each with the right value."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import ModelCheckpoint, TrainModule

INPUTS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.seen = []

    def loss_of(self, batch):
        return (self.layer(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss_of(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(quiet_trainer, tmp_path):
    """Train a module, and go on from the last checkpoint of the fit before, if it is continued."""

    def run(module, *, continued=False, callback=None, **options):
        callback = callback or ModelCheckpoint(tmp_path, save_last=True)
        trainer = quiet_trainer(callbacks=callback, **options)
        loader = DataLoader(TensorDataset(INPUTS), batch_size=4)
        trainer.fit(module, loader, loader, ckpt_path=tmp_path / "last" if continued else None)
        return trainer

    return run


@pytest.mark.parametrize("stop", [2, 3, 4, 8, 11])
def test_a_run_that_goes_on_within_an_epoch_validates_when_it_would_have(fit, stop):
    class Order(Net):
        def on_train_batch_start(self, batch, batch_idx):
            seen.append(("train", self.trainer.global_step, batch_idx))

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            seen.append(("val", self.trainer.global_step, batch_idx))

    options = {"max_epochs": 2, "val_check_interval": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    seen = []
    fit(Order(), **options)
    whole, seen = seen, []
    fit(Order(), max_steps=stop, **options)
    fit(Order(), continued=True, **options)
    assert seen == whole  # 19367


def test_the_rates_of_optimizers_are_those_of_the_scheduler_after_a_resume(fit):
    class Rates(Net):
        def on_train_epoch_start(self):
            mine, trainers = self.optimizers(), self.trainer.optimizers[0]
            self.seen.append((mine.param_groups[0]["lr"], trainers.param_groups[0]["lr"]))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    fit(Rates(), max_epochs=2)
    module = Rates()
    fit(module, max_epochs=4, continued=True)
    assert module.seen == [(0.025, 0.025), (0.0125, 0.0125)]  # 17296


def test_a_plateau_is_found_though_the_run_goes_on_before_its_first_validation(fit):
    class Plateau(Net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    rates = [fit(Plateau(), max_epochs=4).optimizers[0].param_groups[0]["lr"]]
    fit(Plateau(), max_epochs=4, max_steps=5)
    rates.append(fit(Plateau(), max_epochs=4, continued=True).optimizers[0].param_groups[0]["lr"])
    assert rates[0] == rates[1] < 0.1  # 14699


def test_a_run_that_goes_on_keeps_the_best_checkpoints_of_both(fit, tmp_path):
    class Scores(Net):
        def on_train_epoch_end(self):
            self.log("score", float([3, 0, 4, 1, 2, 5][self.current_epoch]))

    def best():
        return ModelCheckpoint(tmp_path, "{score:.0f}", monitor="score", save_top_k=2, save_last=True)

    fit(Scores(), callback=best(), max_epochs=3)
    fit(Scores(), callback=best(), max_epochs=6, continued=True)
    assert {path.name for path in tmp_path.glob("score=*")} >= {"score=0.ckpt", "score=1.ckpt"}
    assert not {path.name for path in tmp_path.glob("score=[234]*")}  # 5173


def test_the_best_of_all_checkpoints_is_known(fit, tmp_path):
    class Scores(Net):
        def on_train_epoch_end(self):
            self.log("score", abs(self.current_epoch - 1.0))

    callback = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_top_k=-1)
    fit(Scores(), callback=callback, max_epochs=3)
    assert callback.best_model_path.endswith("epoch=1.ckpt")  # 2586
    assert callback.best_model_score == 0
