"""Values of validation and test steps, where ``on_step=True`` asks for them."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("devices", [1, 2])
def test_loggers_write_them_for_each_batch_with_the_batches_evaluated_as_the_step(
    quiet_trainer, make_line, loader, averaging, recorder, devices
):
    class Steps(type(make_line())):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val", float(batch_idx + self.global_rank), on_step=True, on_epoch=False)
            self.log("both", 1.0, on_step=True, on_epoch=True, add_dataloader_idx=False)
            self.log("hidden", 1.0, on_step=True, logger=False)

    trainer = quiet_trainer(
        strategy=averaging() if devices > 1 else "auto", devices=devices, logger=recorder, max_epochs=2
    )
    loaders = [loader(count=24 if devices == 2 else 16), loader(count=8 * devices)]  # rank 0 has two batches, and one
    trainer.fit(make_line(Steps), loader(24), loaders)
    assert [(step, row) for step, row in recorder.rows if "both_step" in row] == [
        (1, {"epoch": 0, "val/dataloader_idx_0": 0.0, "both_step": 1.0}),
        (2, {"epoch": 0, "val/dataloader_idx_0": 1.0, "both_step": 1.0}),
        (1, {"epoch": 0, "val/dataloader_idx_1": 0.0, "both_step": 1.0}),
        (3, {"epoch": 1, "val/dataloader_idx_0": 0.0, "both_step": 1.0}),
        (4, {"epoch": 1, "val/dataloader_idx_0": 1.0, "both_step": 1.0}),
        (2, {"epoch": 1, "val/dataloader_idx_1": 0.0, "both_step": 1.0}),
    ]


def test_nothing_is_written_where_step_values_are_not(quiet_trainer, make_line, loader, recorder):
    class Steps(type(make_line())):
        def validation_step(self, batch, batch_idx):
            self.log("val", float(batch_idx), on_step=True, on_epoch=False)

    quiet_trainer(logger=recorder, log_every_n_steps=0).validate(make_line(Steps), loader())
    assert recorder.rows == []


def test_the_sanity_check_writes_none(quiet_trainer, make_line, loader, recorder):
    class Steps(type(make_line())):
        def validation_step(self, batch, batch_idx):
            if self.trainer.sanity_checking or batch_idx > 0:
                self.log("val", float(batch_idx), on_step=True, on_epoch=False)

    quiet_trainer(logger=recorder, max_epochs=1).fit(make_line(Steps), loader(24), loader(24))
    assert [(step, row["val"]) for step, row in recorder.rows if "val" in row] == [(2, 1.0)]
