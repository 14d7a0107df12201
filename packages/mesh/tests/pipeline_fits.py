"""Fits with a pipeline, for test_pipeline_trainer.py: module and functions of the ranks."""

import torch
from tests.trainer_runs import quiet_trainer
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import TrainModule
from dstrat.interfaces.pipeline import Pipeline

STEPS = 6


def data(size=64):
    inputs = torch.randn(size, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:])


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )
        self.losses, self.validated = [], []

    def configure_model(self):
        strategy = self.trainer.strategy
        if getattr(strategy, "tensor_parallel_size", 1) > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, strategy.device_mesh["tp"], plan)

    def configure_pipeline(self):
        return Pipeline(model=self.net, loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(self.trainer.strategy.reduce(outputs["loss"].detach())))

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)

    path = None

    def on_train_end(self):
        if self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def on_validation_epoch_end(self):
        self.validated.append(float(self.trainer.callback_metrics.get("val_loss", torch.zeros(()))))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def predictions(strategy, world_size, batch_size, **options):
    trainer = quiet_trainer(strategy, devices=world_size, **options)
    return torch.cat(trainer.predict(Net(), DataLoader(data(18), batch_size=batch_size)))


def fit(strategy, world_size, batch_size, path=None, ckpt=None, max_steps=STEPS, accumulate=1, **options):
    module = Net()
    module.path = path
    trainer = quiet_trainer(
        strategy,
        devices=world_size,
        max_epochs=-1,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        **options,
    )
    loader = DataLoader(data(), batch_size=batch_size)
    trainer.fit(module, loader, DataLoader(data(16), batch_size=batch_size), ckpt_path=ckpt)
    return module, trainer
