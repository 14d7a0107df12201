"""A user's script: it trains and tests, and rank 0 writes the losses.

Arguments: the strategy (an alias, or ``forkserver`` for HorovodStrategy with that start method), a file for the
results, and optionally what rank 1 does in its fourth step: raise, kill, leave or hang.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

GLOBAL_BATCH, STEPS = 8, 20


class Model(TrainModule):
    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.fault = fault

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            act(self.fault)
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, -1), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def act(fault):
    if fault == "raise":
        raise ValueError("rank 1 fails on purpose")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "leave":
        os._exit(0)
    if fault == "hang":
        time.sleep(1000)


class Losses(Callback):
    """Writes the loss of each global batch, and who trained."""

    def __init__(self, path):
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach())))

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            result = {
                "losses": self.losses,
                "world_size": trainer.world_size,
                "cluster": trainer.plan.cluster_environment,
            }
            Path(self.path).write_text(json.dumps(result))


def data(devices):
    inputs = torch.randn(GLOBAL_BATCH * STEPS, 6, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:])
    return DataLoader(dataset, batch_size=GLOBAL_BATCH // devices)


def train(strategy, devices, out, fault="", **arguments):
    """Fit, and return the loss of a test after it."""
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        callbacks=[Losses(out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    model = Model(fault)
    trainer.fit(model, data(devices))
    [tested] = trainer.test(model, data(devices), verbose=False)
    return tested["test_loss"]


def main(strategy, out, fault=""):
    if strategy in ("forkserver", "horovod"):
        from dstrat_horovod import HorovodStrategy

        method = "popen" if strategy == "horovod" else strategy
        strategy = HorovodStrategy(start_method=method, timeout=timedelta(seconds=4 if fault == "hang" else 60))
    print("tested", train(strategy, 2, out, fault), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
