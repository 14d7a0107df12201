from __future__ import annotations

import json

import pytest
import torch

from dstrat import Callback


class Snapshot(Callback):
    """Takes the state of what is logged in the middle of an epoch, or puts it back before the first batch."""

    def __init__(self, state=None, at=3):
        self.state, self.at = state, at

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.state is not None and batch_idx == 0:
            trainer.fit_loop.logged.load_state_dict(self.state, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.state is None and batch_idx + 1 == self.at:
            self.state = trainer.fit_loop.logged.state_dict()


class Part(torch.utils.data.Dataset):
    """The batches of a loader from an index."""

    def __init__(self, loader, start):
        self.batches = list(loader)[start:]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


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
    first = next(iter(whole))[1][0]
    callback = Snapshot()
    never_stopped = quiet_trainer(max_epochs=1, callbacks=callback)
    never_stopped.fit(make_line(Logging), whole)
    state = json.loads(json.dumps(callback.state))  # as a checkpoint brings it
    rest = torch.utils.data.DataLoader(Part(whole, 3), batch_size=None)
    resumed = quiet_trainer(max_epochs=1, callbacks=Snapshot(state))
    resumed.fit(make_line(Logging), rest)
    assert resumed.callback_metrics == never_stopped.callback_metrics
    assert resumed.callback_metrics["begun"] == 2.0
    assert "once" in resumed.callback_metrics


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
    assert resumed.callback_metrics == never_stopped.callback_metrics
