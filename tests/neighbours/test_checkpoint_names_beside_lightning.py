"""ModelCheckpoint names its files as Lightning's does, with the same arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import dstrat
from dstrat.callbacks import ModelCheckpoint

lightning = pytest.importorskip("lightning.pytorch", reason="this environment has no Lightning: nox -s neighbours has")

pytestmark = [pytest.mark.neighbours, pytest.mark.filterwarnings("ignore")]

VALUES = {"epoch": 3, "step": 40, "val_loss": torch.tensor(0.25), "val/acc": torch.tensor(0.5), "val.f1": 0.125}
TEMPLATES = (
    *(None, "plain", "{step}", "{epoch}", "{epoch}-{step}", "{epoch:02d}", "{epoch}-{val_loss:.2f}", "best-{val_loss}"),
    *("epoch={epoch}-loss={val_loss:.3f}", "{val/acc:.1f}", "{val.f1}", "{step:06d}_{epoch}"),
)


@pytest.mark.parametrize("ver", [None, 2])
@pytest.mark.parametrize("options", [{}, {"auto_insert_metric_name": False}])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gives_the_name_that_lightning_gives(template, options, ver):
    theirs = lightning.callbacks.ModelCheckpoint(filename=template, **options)
    ours = ModelCheckpoint(filename=template, **options)
    assert ours.format_checkpoint_name(VALUES, ver=ver) == theirs.format_checkpoint_name(dict(VALUES), ver=ver)


def steps_of(base):
    class Net(base):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).pow(2).mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(batch_idx + 1))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1},
        {"filename": "{epoch}-{val_loss:.2f}", "monitor": "val_loss", "save_top_k": -1},
        {"filename": "{epoch}-{val_loss:.2f}", "monitor": "val_loss", "auto_insert_metric_name": False},
    ],
)
def test_a_run_leaves_the_names_that_lightning_leaves(tmp_path, arguments):
    written = {}
    for name, library, base in (
        ("theirs", lightning, lightning.LightningModule),
        ("ours", dstrat, dstrat.TrainModule),
    ):
        callback = library.callbacks.ModelCheckpoint(tmp_path / name, **arguments)
        trainer = library.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            callbacks=[callback],
            default_root_dir=tmp_path,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(steps_of(base), DataLoader(torch.ones(6, 2), batch_size=2), DataLoader(torch.ones(4, 2)))
        written[name] = sorted(path.name for path in Path(tmp_path / name).glob("*.ckpt"))
    assert written["ours"] == written["theirs"]
