from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from dstrat import Callback, LearningRateMonitor, Logger, StochasticWeightAveraging


class Snapshot(Callback):
    """Takes the state of what is logged in the middle of an epoch, or puts it back before the first batch."""

    def __init__(self, state=None, at=3):
        self.state, self.at = state, at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.state is not None and batch_idx == 0:
            trainer.fit_loop.logged.load_state_dict(self.state, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.state is None and batch_idx + 1 == self.at:
            state = trainer.fit_loop.logged.state_dict()
            self.state = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().clone(), state)  # as a checkpoint does


class Part(torch.utils.data.Dataset):
    """The batches of a loader from an index."""

    def __init__(self, loader, start):
        self.batches = list(loader)[start:]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def numbers(metrics):
    return {name: float(value) for name, value in metrics.items()}


def test_an_epoch_that_goes_on_has_the_values_of_one_that_was_never_stopped(quiet_trainer, make_line, loader):
    class Logging(type(make_line())):
        def on_train_epoch_start(self):
            self.log("begun", 2.0, reduce_fx="sum")

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            for reduce_fx in (torch.mean, "sum", "max", "min"):
                name = reduce_fx if isinstance(reduce_fx, str) else "mean"
                self.log(name, batch[0].sum(), on_epoch=True, reduce_fx=reduce_fx)
            if batch[1][0] == first:
                self.log("once", batch[0].mean(), on_step=False, on_epoch=True)
            return loss

    whole = loader()
    first = next(iter(whole))[1][0].item()
    callback = Snapshot()
    never_stopped = quiet_trainer(max_epochs=1, callbacks=callback)
    never_stopped.fit(make_line(Logging), whole)
    rest = torch.utils.data.DataLoader(Part(whole, 3), batch_size=None)
    resumed = quiet_trainer(max_epochs=1, callbacks=Snapshot(callback.state))
    resumed.fit(make_line(Logging), rest)
    assert numbers(resumed.callback_metrics) == numbers(never_stopped.callback_metrics)
    assert resumed.callback_metrics["begun"] == 2.0
    assert "once" in resumed.callback_metrics


def test_the_progress_bar_shows_step_values_of_a_validation_before_the_resume(
    quiet_trainer, make_line, loader, tmp_path
):
    class Validated(type(make_line())):
        def validation_step(self, batch, batch_idx):
            self.log("step", 1.0, on_step=True, on_epoch=False, prog_bar=True)
            self.log("both", float(batch_idx), on_step=True, on_epoch=True, prog_bar=True)

    def fit(epochs, **options):
        trainer = quiet_trainer(max_epochs=epochs, check_val_every_n_epoch=3, num_sanity_val_steps=0)
        trainer.fit(make_line(Validated), loader(), loader(), **options)
        return trainer

    fit(3).save_checkpoint(tmp_path / "saved.ckpt")
    never_stopped = fit(4).progress_bar_metrics
    assert set(never_stopped) == {"step", "both", "both_epoch"}
    assert fit(4, ckpt_path=tmp_path / "saved.ckpt").progress_bar_metrics == never_stopped


def test_the_mean_of_an_epoch_has_all_sizes_after_a_resume_between_accumulated_batches(
    quiet_trainer, make_line, loader, tmp_path
):
    path = tmp_path / "saved.ckpt"

    def fit(*callbacks, **options):
        trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=4, callbacks=callbacks)
        trainer.fit(make_line(), loader(), **options)
        return trainer.callback_metrics["loss_epoch"]

    assert fit(SavesAt(path, 2)) == fit(ckpt_path=path)


def test_metric_objects_go_on_too(quiet_trainer, make_line, loader):
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

    class Logging(type(make_line())):
        def __init__(self):
            super().__init__()
            self.mse, self.seen = torchmetrics.MeanSquaredError(), torchmetrics.CatMetric()

        def training_step(self, batch, batch_idx):
            self.mse(batch[0].sum(1), batch[0][:, 0])
            self.seen.update(batch[0].sum())
            self.log("mse", self.mse, on_epoch=True)
            if batch_idx == 5:
                self.seen.update(self.seen.compute().sum())
            return self.loss(batch)

    whole, callback = loader(), Snapshot()
    never_stopped = quiet_trainer(max_epochs=1, callbacks=callback)
    never_stopped.fit(make_line(Logging), whole)
    rest = torch.utils.data.DataLoader(Part(whole, 3), batch_size=None)
    resumed = quiet_trainer(max_epochs=1, callbacks=Snapshot(callback.state))
    resumed.fit(make_line(Logging), rest)
    assert numbers(resumed.callback_metrics) == numbers(never_stopped.callback_metrics)


class Rows(Logger):
    """Keeps the rows."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


class SavesAt(Callback):
    saves_checkpoints = runs_last = True

    def __init__(self, path, at):
        self.path, self.at = path, at

    def on_train_batch_end(self, trainer, *args):
        if trainer.fit_loop.batches_seen == self.at:
            trainer.save_checkpoint(self.path)


class SeesRates(Callback):
    """Sees the rates before the other callbacks set them."""

    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("at", [4, 6, 9, 12])  # of epochs of six batches: within one, and at its end
def test_a_resumed_run_writes_the_rows_and_rates_that_follow(quiet_trainer, make_line, loader, tmp_path, at):
    class Validated(type(make_line())):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def fit(*callbacks, **options):
        rows, seen = Rows(), SeesRates()
        averaging = StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2)
        monitor = LearningRateMonitor(logging_interval="epoch")
        trainer = quiet_trainer(max_epochs=3, logger=rows, callbacks=[seen, averaging, monitor, *callbacks])
        trainer.fit(make_line(Validated), loader(), loader(), **options)
        return rows.rows, seen.rates

    path = tmp_path / "saved.ckpt"
    whole = fit(SavesAt(path, at))
    for all_values, values in zip(whole, fit(ckpt_path=path), strict=True):
        assert values == all_values[-len(values) :]
        assert values
