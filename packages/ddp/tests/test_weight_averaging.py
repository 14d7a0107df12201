"""Averages of weights and batch-norm statistics in several processes, where each has statistics of its own data."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat.callbacks import EMAWeightAveraging
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat_ddp import DDPStrategy


class Normalized(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Record(Callback):
    """Writes the statistics of each rank in each validation, and at the end of training; may save in a validation."""

    def __init__(self, folder, save_path=None):
        self.folder, self.save_path = folder, save_path
        self.means = []

    def on_validation_end(self, trainer, module):
        if self.save_path and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.save_path)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        self.means.append((trainer.current_epoch, module.layers[0].running_mean.tolist()))

    def on_train_end(self, trainer, module):
        self.means.append(("end", module.layers[0].running_mean.tolist()))
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(self.means))


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")  # since torch 2.13
@pytest.mark.parametrize(
    ("io", "saves_average"), [(None, True), (TorchCheckpointIO(), True), (None, False)],
    ids=["portable", "torch file", "weights in the module"],
)  # fmt: skip
def test_averages_go_on_as_if_training_had_not_stopped(tmp_path, io, saves_average):
    def fit(name, ckpt_path=None, save_path=None):
        (tmp_path / name).mkdir()
        record = Record(tmp_path / name, save_path)
        averaging = EMAWeightAveraging(decay=0.5)
        strategy = DDPStrategy(start_method="fork", broadcast_buffers=False, checkpoint_io=io)
        trainer = Trainer(
            accelerator="cpu", strategy=strategy, devices=2, max_epochs=2, num_sanity_val_steps=0, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            default_root_dir=tmp_path, callbacks=[record, averaging] if saves_average else [averaging, record],
        )  # fmt: skip
        data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
        trainer.fit(Normalized(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=16), ckpt_path=ckpt_path)
        return [json.loads((tmp_path / name / f"rank{rank}.json").read_text()) for rank in range(2)]

    whole = fit("whole", save_path=tmp_path / "saved.ckpt")
    resumed = fit("resumed", ckpt_path=tmp_path / "saved.ckpt")
    assert resumed == [[entry for entry in of_rank if entry[0] != 0] for of_rank in whole]
    evaluated = [[entry for entry in of_rank if entry[0] != "end"] for of_rank in whole]
    assert evaluated[0] == evaluated[1]  # the average that a checkpoint has
