"""Training through the Trainer, as a user's program does it, with a checkpoint in the middle."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.errors import RankFailedError
from dstrat_bagua import BaguaStrategy, QAdamOptimizer

STEPS = 12


class Regression(TrainModule):
    def __init__(self, algorithm):
        super().__init__()
        torch.manual_seed(0)
        self.algorithm = algorithm
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        if self.algorithm == "qadam":
            return QAdamOptimizer(self.parameters(), lr=0.01, warmup_steps=3)
        return torch.optim.Adam(self.parameters(), lr=0.01)


class SaveAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def loader():
    x = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3] - x[:, 3:]), batch_size=4, shuffle=True)


def fit(algorithm, steps=STEPS, save_to=None, resume_from=None, **options):
    module = Regression(algorithm)
    trainer = Trainer(
        strategy=BaguaStrategy(algorithm, start_method="fork", **options),
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        val_check_interval=4,
        callbacks=[SaveAt(save_to, 7)] if save_to else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume_from)
    return module, float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("algorithm", ["qadam", "low_precision_decentralized"])
def test_a_resumed_training_ends_with_the_same_weights(algorithm, tmp_path):
    at = str(tmp_path / "checkpoint")
    expected, loss = fit(algorithm, hierarchical=False)
    fit(algorithm, steps=7, save_to=at, hierarchical=False)
    found, other_loss = fit(algorithm, resume_from=at, hierarchical=False)
    assert all(torch.equal(one, found.state_dict()[name]) for name, one in expected.state_dict().items())
    assert other_loss == loss


def test_the_user_gets_the_error_of_an_algorithm():
    with pytest.raises(RankFailedError, match="algorithm 'qadam' needs one QAdamOptimizer, and configure_optimizers"):
        Trainer(
            strategy=BaguaStrategy("qadam", start_method="fork"),
            accelerator="cpu",
            devices=2,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Regression("other"), loader())
