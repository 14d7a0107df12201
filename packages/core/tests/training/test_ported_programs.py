"""What programs for Lightning rely on, beside names and hooks."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.utils import prune

from dstrat import CSVLogger, ModelCheckpoint, ModelPruning, ProgressBar, TensorBoardLogger
from dstrat.checkpoint.paths import RemotePath
from dstrat.errors import MisuseError, RequestError


class Smallest(prune.BasePruningMethod):
    """Has no amount: prunes what is below a limit."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > 0.44)


@pytest.mark.parametrize("is_global", [True, False])
def test_a_pruning_method_need_not_take_an_amount(quiet_trainer, line, loader, is_global):
    pruning = ModelPruning(
        Smallest, use_global_unstructured=is_global, parameter_names=["weight"], use_lottery_ticket_hypothesis=False
    )
    quiet_trainer(callbacks=pruning, max_epochs=1).fit(line, loader())
    weight = line.layer.weight
    assert ((weight == 0) | (weight.abs() > 0.44)).all()
    assert (weight == 0).any()


def test_overfitting_validates_on_the_same_batches_in_every_epoch(quiet_trainer, line_class, loader):
    seen = []

    class Seeing(line_class):
        def validation_step(self, batch, batch_idx):
            seen.append(batch[0][0, 0].item())

    trainer = quiet_trainer(
        overfit_batches=1, max_epochs=4, num_sanity_val_steps=0, reload_dataloaders_every_n_epochs=2
    )
    trainer.fit(Seeing(), loader(shuffle=True), [loader(shuffle=True)])
    assert (len(seen), len(set(seen))) == (4, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CHECKPOINT_NAME_LAST", "{epoch}-last"),
        ("CHECKPOINT_JOIN_CHAR", "_"),
        ("CHECKPOINT_EQUALS_CHAR", ":"),
        ("FILE_EXTENSION", ".pt"),
        ("STARTING_VERSION", 0),
    ],
)
def test_a_constant_of_checkpoint_names_can_be_read_and_not_changed(quiet_trainer, line, loader, name, value):
    changed = type("Mine", (ModelCheckpoint,), {name: value})()
    with pytest.raises(RequestError, match=rf"Mine\.{name} = .* would have no effect: "):
        quiet_trainer(callbacks=changed).fit(line, loader())
    assert getattr(ModelCheckpoint, name) != value


@pytest.mark.parametrize("base", [CSVLogger, TensorBoardLogger])
def test_a_logger_may_override_its_name_and_version(quiet_trainer, line, loader, tmp_path, base):
    class Mine(base):
        name = property(lambda self: "me")
        version = property(lambda self: "mine")

    trainer = quiet_trainer(logger=Mine(tmp_path))
    trainer.fit(line, loader())
    assert trainer.log_dir == tmp_path / "me" / "mine"
    assert any(path.name.startswith(("metrics.csv", "events")) for path in trainer.log_dir.iterdir())


def test_a_logger_may_override_its_folder(quiet_trainer, line, loader, tmp_path):
    class Mine(CSVLogger):
        log_dir = property(lambda self: str(tmp_path / "elsewhere"))

    trainer = quiet_trainer(logger=Mine(), callbacks=ModelCheckpoint())
    trainer.fit(line, loader())
    assert (trainer.log_dir / "metrics.csv").exists()
    assert trainer.checkpoint_callback.dirpath == tmp_path / "elsewhere" / "checkpoints"


def test_folders_can_be_added_to_a_str(quiet_trainer, line, loader, tmp_path):
    trainer = quiet_trainer(logger=CSVLogger(tmp_path), callbacks=ModelCheckpoint(tmp_path / "saved"))
    trainer.fit(line, loader())
    logger, checkpoint = trainer.logger, trainer.checkpoint_callback
    for folder in (trainer.log_dir, trainer.default_root_dir, logger.log_dir, logger.save_dir, checkpoint.dirpath):
        assert folder + "/x" == os.path.join(folder, "x") == str(folder / "x")  # noqa: PTH118 - as these programs do
        assert "in " + folder == f"in {folder}"
    assert RemotePath("s3://bucket") + "/x" == "s3://bucket/x"


def test_loaders_of_the_trainer_are_in_the_users_structure(quiet_trainer, line_class, loader):
    class Looking(line_class):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.seen = self.trainer.val_dataloaders

    module, trainer = Looking(), quiet_trainer()
    assert trainer.val_dataloaders is None
    trainer.validate(module, loader(4))
    assert module.seen.batch_size == 4
    trainer.validate(module, [loader(4)])
    assert [one.batch_size for one in module.seen] == [4]
    trainer.validate(module, {"a": loader(4), "b": loader(2)})
    assert {name: one.batch_size for name, one in module.seen.items()} == {"a": 4, "b": 2}


def test_predictions_are_returned_unless_they_are_refused(quiet_trainer, line, loader):
    trainer = quiet_trainer()
    assert len(trainer.predict(line, loader(), return_predictions=None)) == 6
    assert len(trainer.predict(line, loader())) == 6
    assert trainer.predict(line, loader(), return_predictions=False) == []


class WithoutGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss


def test_an_optimizer_may_call_the_closure_without_gradients(quiet_trainer, line_class, make_line, loader):
    class Own(line_class):
        def configure_optimizers(self):
            return WithoutGradients(self.parameters(), lr=self.lr)

    own, usual = make_line(Own), make_line()
    for module in (own, usual):
        quiet_trainer().fit(module, loader())
    assert torch.equal(own.layer.weight, usual.layer.weight)


class Bar(ProgressBar):
    def on_train_epoch_start(self, trainer, module):
        super().on_train_epoch_start(trainer, module)
        assert self.trainer is trainer
        self.totals = self.total_train_batches, self.total_val_batches


def test_the_logger_of_a_trainer_can_be_set(quiet_trainer, line, loader, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.logger = CSVLogger(tmp_path / "set")
    trainer.fit(line, loader())
    assert list((tmp_path / "set").rglob("metrics.csv"))
    trainer.logger = None
    assert (trainer.logger, trainer.loggers) == (None, [])
    with pytest.raises(RequestError, match=r"logger='csv' is not a Logger"):
        trainer.logger = "csv"


def test_a_progress_bar_knows_the_trainer_and_can_be_disabled(quiet_trainer, line, loader, capsys):
    bar = Bar()
    with pytest.raises(MisuseError, match=r"Bar\.trainer is known from setup on"):
        bar.trainer  # noqa: B018 - the property raises
    bar.disable()
    quiet_trainer(callbacks=bar, max_epochs=1).fit(line, loader(), loader())
    assert bar.totals == (6, 6)
    assert (bar.is_enabled, capsys.readouterr().err) == (False, "")
    bar.enable()
    quiet_trainer(callbacks=bar, max_epochs=1).fit(line, loader(), loader())
    assert "Epoch 1/1: 6/6 batches" in capsys.readouterr().err
