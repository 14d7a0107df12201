"""A fit that goes on from a file as Lightning 2 writes it."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.accelerators import ACCELERATOR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule
from dstrat.cli.checkpoint.convert import convert
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.component import Component

BATCHES, EPOCHS = 4, 6


class Net(TrainModule):
    def __init__(self, width=16):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BATCHES * EPOCHS)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class HalfFrozen(Net):
    """Its optimizer does not have all parameters, so their numbers say nothing about names."""

    def configure_optimizers(self):
        self.layers[0].requires_grad_(False)
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def loader():
    x = torch.randn(BATCHES * 12, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)


def by_hand(module, stops=(), folder=None):
    """Train as Lightning does, and write what it writes when ModelCheckpoint saves after the steps in ``stops``."""
    configured = module.configure_optimizers()
    optimizer, schedulers = (configured[0][0], [configured[1][0]["scheduler"]]) if isinstance(configured, tuple) else (
        configured, [])  # fmt: skip
    step = 0
    for epoch in range(EPOCHS):
        for batch_idx, batch in enumerate(loader()):
            optimizer.zero_grad()
            module.training_step(batch, batch_idx).backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            step += 1
            if step in stops:
                file = lightning_file(module, optimizer, schedulers, epoch, batch_idx, step)
                torch.save(file, folder / f"{step}.ckpt")
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def lightning_file(module, optimizer, schedulers, epoch, batch_idx, step):
    done = batch_idx + 1
    is_last = done == BATCHES

    def progress(current, total, **more):
        names = ("ready", "started", "processed", "completed")
        return {
            "total": dict.fromkeys(names, total) | {"completed": total - 1},
            "current": dict.fromkeys(names, current) | {"completed": current - 1}, **more,
        }  # fmt: skip

    epochs = {"ready": epoch + 1, "started": epoch + 1, "processed": epoch, "completed": epoch}
    loop = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": progress(done, step, is_last_batch=is_last),
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
    }
    return {
        "epoch": epoch,
        "global_step": step,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": loop},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict() for scheduler in schedulers],
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 16},
    }


@pytest.fixture
def converted(tmp_path):
    """Return the path of a converted file that was saved after a step."""

    def convert_(step, cls=Net):
        by_hand(cls(), [step], tmp_path)
        outcome = CliRunner().invoke(convert, [str(tmp_path / f"{step}.ckpt"), str(tmp_path / f"{step}")])
        assert outcome.exit_code == 0, outcome.output
        return tmp_path / str(step)

    return convert_


@pytest.fixture
def go_on(tmp_path):
    def fit(module, path, max_epochs=EPOCHS):
        trainer = Trainer(
            accelerator=ACCELERATOR, devices=1, max_epochs=max_epochs, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, loader(), ckpt_path=path)
        return trainer, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    return fit


@pytest.mark.parametrize("cls", [Net, HalfFrozen])
def test_from_the_end_of_an_epoch_it_goes_on_exactly(converted, go_on, caplog, cls):
    with caplog.at_level(logging.WARNING):
        trainer, weights = go_on(cls(), converted(8, cls))
    assert (trainer.global_step, trainer.current_epoch) == (24, 6)
    assert torch.equal(weights, by_hand(cls()))
    (line,) = [record.getMessage() for record in caplog.records if "comes from" in record.getMessage()]
    assert line.endswith(
        "comes from PyTorch Lightning 2.6.6: weights, optimizers, schedulers and counters resume; random numbers start "
        "anew, and the data resumes at the beginning of epoch 2"
    )


class Watching(Net):
    """Has two schedulers more: one for each second epoch, one that watches a value."""

    def configure_optimizers(self):
        [optimizer], [first] = super().configure_optimizers()
        second = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "frequency": 2}
        third = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [first, second, {"scheduler": third, "monitor": "loss"}]

    def on_train_start(self):
        self.steps = [config.scheduler.last_epoch for config in self.trainer.lr_scheduler_configs]


@pytest.mark.parametrize("cls", [Net, Watching])
def test_schedulers_that_were_not_saved_are_stepped_to_where_they_would_be(tmp_path, go_on, caplog, cls):
    by_hand(Net(), [8], tmp_path)
    file = torch.load(tmp_path / "8.ckpt") | {"lr_schedulers": []}
    file["optimizer_states"][0]["param_groups"][0]["lr"] = 5.0  # of a scheduler that is not torch's
    torch.save(file, tmp_path / "8.ckpt")
    assert CliRunner().invoke(convert, [str(tmp_path / "8.ckpt"), str(tmp_path / "8")]).exit_code == 0
    module, said = cls(), "no state of schedulers was converted: "
    with caplog.at_level(logging.WARNING):
        _, weights = go_on(module, tmp_path / "8", max_epochs=EPOCHS if cls is Net else 2)
    lines = [text.removeprefix(said) for text in caplog.messages if text.startswith(said)]
    assert lines[0] == "CosineAnnealingLR is where it would be after 8 steps and 2 epochs"
    if cls is Net:
        assert torch.equal(weights, by_hand(Net()))
    else:
        assert module.steps == [8, 1, 0]
        assert lines[2] == "ReduceLROnPlateau begins anew"


def test_an_epoch_that_was_left_in_the_middle_begins_anew(converted, go_on):
    trainer, _ = go_on(Net(), converted(6))
    assert (trainer.global_step, trainer.current_epoch) == (6 + 5 * BATCHES, 6)


def test_weights_alone_do_not_make_a_fit_go_on(tmp_path, go_on):
    file = lightning_file(Net(), torch.optim.SGD([nn.Parameter(torch.ones(1))]), [], 0, 1, 2)
    torch.save({key: file[key] for key in file if key != "optimizer_states"}, tmp_path / "weights.ckpt")
    CliRunner().invoke(convert, [str(tmp_path / "weights.ckpt"), str(tmp_path / "weights")])
    with pytest.raises(CheckpointError, match="has weights only"):
        go_on(Net(), tmp_path / "weights")


def test_a_module_is_made_again_from_it(converted):
    assert Net.load_from_checkpoint(converted(4)).hparams.width == 16


@pytest.mark.parametrize("cls", [Net, HalfFrozen])
def test_a_fit_goes_on_from_the_file_itself(tmp_path, go_on, cls):
    by_hand(cls(), [8], tmp_path)
    trainer, weights = go_on(cls(), tmp_path / "8.ckpt")
    assert (trainer.global_step, trainer.current_epoch) == (24, 6)
    assert torch.equal(weights, by_hand(cls()))


def test_a_file_of_another_program_says_how_to_convert_it(tmp_path, go_on):
    by_hand(Net(), [8], tmp_path)
    path = tmp_path / "8.ckpt"
    file = torch.load(path)
    del file["pytorch-lightning_version"]
    torch.save(file, path)
    with pytest.raises(CheckpointError, match=f"another program: convert it by 'dstrat checkpoint convert {path} NEW'"):
        go_on(Net(), path)


class Diary(CheckpointIO):
    """Reads folders with a file of its own."""

    @classmethod
    def recognizes(cls, path):
        return Path(path, "diary").exists()

    def save_checkpoint(self, checkpoint, path):
        raise AssertionError

    def load_checkpoint(self, path):
        raise AssertionError


def test_what_a_plugin_recognizes_is_named_with_how_to_convert_it(tmp_path, go_on):
    catalog = get_catalog()
    catalog.register(Component(kind="checkpoint_io", alias="diary", target=Diary, summary="for a test"))
    try:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "diary").touch()
        line = f"'diary' from this process finds: convert it by 'dstrat checkpoint convert {tmp_path / 'd'} NEW'"
        for load in (partial(go_on, Net()), Net.load_from_checkpoint):
            with pytest.raises(CheckpointError, match=line):
                load(tmp_path / "d")
    finally:
        catalog.unregister("checkpoint_io", "diary")
