"""Evaluation whose steps communicate, on ranks with different numbers of batches."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from dstrat import Trainer, TrainModule


class Gathering(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def validation_step(self, batch, batch_idx):
        assert self.all_gather(batch.sum()).shape == (2,)
        self.log("samples", float(len(batch)), reduce_fx="sum")


def test_a_rank_without_a_batch_takes_part_in_the_steps_of_the_others():
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy="horovod", accelerator="cpu", devices=2, enable_model_summary=False, **quiet)
    logged = trainer.validate(Gathering(), DataLoader(torch.randn(9, 4), batch_size=4), verbose=False)
    assert logged == [{"samples": 9.0}]
