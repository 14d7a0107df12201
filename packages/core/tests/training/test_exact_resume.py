"""A run that is continued from a checkpoint equals one that never stopped, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, TorchCheckpointIO, TrainModule
from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO


class Net(TrainModule):
    """Has everything that could go on differently: dropout, momentum, a scheduler, logged values."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class SavesEveryBatch(Callback):
    """Saves after each batch, where other callbacks may save too."""

    saves_checkpoints = runs_last = True

    def __init__(self, folder, at):
        self.folder, self.at = folder, at

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen == self.at:
            trainer.save_checkpoint(self.folder / "saved")
            trainer.should_stop = True


class NotesEpochs(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.callback_metrics["loss_epoch"].item())


def data():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(22, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def fit(quiet_trainer, *, callbacks, ckpt_path=None, num_workers=0, io=TorchCheckpointIO, **options):
    torch.manual_seed(3)
    module = Net()
    trainer = quiet_trainer(max_epochs=2, plugins=[io()], callbacks=callbacks, val_check_interval=3, **options)
    loader = DataLoader(data(), batch_size=4, shuffle=True, num_workers=num_workers)
    trainer.fit(module, loader, DataLoader(data(), batch_size=11, shuffle=True), ckpt_path=ckpt_path)
    return module, trainer


def state(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_stopped_at_every_batch(quiet_trainer, tmp_path, accumulate, io):
    options = {"accumulate_grad_batches": accumulate, "io": io}
    epochs = NotesEpochs()
    whole, trainer = fit(quiet_trainer, callbacks=[epochs], **options)
    for at in range(1, 12):
        folder = tmp_path / str(at)
        folder.mkdir()
        first, _ = fit(quiet_trainer, callbacks=[SavesEveryBatch(folder, at)], **options)
        again = NotesEpochs()
        second, resumed = fit(quiet_trainer, callbacks=[again], ckpt_path=folder / "saved", **options)
        assert first.losses == whole.losses[:at]
        assert second.losses == whole.losses[at:], at
        assert torch.equal(state(second), state(whole)), at
        assert resumed.global_step == trainer.global_step
        assert again.epochs == epochs.epochs[-len(again.epochs) :], at
        assert resumed.callback_metrics == trainer.callback_metrics
