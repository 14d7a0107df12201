"""Checkpoints that earlier versions have written go on being loaded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import TrainModule

OF_2026_11_22 = Path(__file__).with_name("checkpoint_of_2026_11_22")
"""Of four steps with this module, written by a single device; the state of random numbers is lists in JSON."""


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.drawn: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, batch, batch_idx):
        self.drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_checkpoint_with_lists_of_random_state_is_resumed(quiet_trainer):
    net = Net()
    data = TensorDataset(torch.arange(48.0).reshape(12, 4))
    trainer = quiet_trainer(max_steps=5)
    trainer.fit(net, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=OF_2026_11_22)
    assert trainer.global_step == 5
    assert net.drawn == [(0.5358820043066892, 0.9779895119966027, 0.3055076599121094)]  # drawn next when it was written
    assert [state["step"] for state in trainer.optimizers[0].state.values()] == [5] * 4
