"""What a run that goes on knows before its first batch."""

from __future__ import annotations

import pytest
from tests.accelerators import make_scaler

from dstrat import Callback, DataModule, TorchCheckpointIO
from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO


class Numbers(DataModule):
    def __init__(self, loader, made):
        super().__init__()
        self.loader, self.made = loader, made

    def train_dataloader(self):
        return self.loader

    val_dataloader = train_dataloader

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Notes(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path=None):
        self.path, self.known = path, None

    def on_train_start(self, trainer, module):
        self.known = {name: value.item() for name, value in trainer.callback_metrics.items()}

    def on_fit_end(self, trainer, module):
        if self.path is not None:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("io", [TorchCheckpointIO, PortableCheckpointIO])
def test_logged_values_and_the_state_of_the_data_module_are_those_of_the_checkpoint(
    quiet_trainer, make_line, loader, tmp_path, io
):
    notes, data = Notes(), Numbers(loader(), 0)
    first = quiet_trainer(max_epochs=1, callbacks=Notes(tmp_path / "saved"), plugins=[io()])
    first.fit(make_line(), datamodule=Numbers(loader(), 7))
    trainer = quiet_trainer(max_epochs=2, callbacks=notes, plugins=[io()])
    trainer.fit(make_line(), datamodule=data, ckpt_path=tmp_path / "saved")
    assert data.made == 7
    assert notes.known == {name: value.item() for name, value in first.callback_metrics.items()}
    assert notes.known.keys() >= {"loss", "val_loss"}


def test_the_scale_of_the_loss_is_that_of_the_checkpoint(quiet_trainer, make_line, loader, tmp_path):
    scales = []

    def precision():
        return MixedPrecision("16-mixed", scaler=make_scaler(init_scale=2.0, growth_interval=2))

    class NotesScale(Notes):
        def on_train_start(self, trainer, module):
            scales.append(trainer.strategy.precision_plugin.state_dict()["scale"])

    quiet_trainer(max_epochs=1, callbacks=NotesScale(tmp_path / "saved"), plugins=[precision()]).fit(
        make_line(), loader()
    )
    trainer = quiet_trainer(max_epochs=2, callbacks=NotesScale(), plugins=[precision()])
    trainer.fit(make_line(), loader(), ckpt_path=tmp_path / "saved")
    assert scales == [2.0, 16.0]  # 6 steps
