"""Hooks have the order and the arguments that they have in Lightning, event by event."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader

import dstrat

lightning = pytest.importorskip("lightning.pytorch", reason="this environment has no Lightning: nox -s neighbours has")

pytestmark = [pytest.mark.neighbours, pytest.mark.filterwarnings("ignore")]

STAGES = ("train", "validation", "test", "predict")
OF_BOTH = (
    *("setup", "teardown", "on_fit_start", "on_fit_end"),
    *(f"on_{stage}_{when}" for stage in STAGES for when in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{when}" for stage in STAGES for when in ("start", "end")),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)
OF_CALLBACKS = (*OF_BOTH, "on_sanity_check_start", "on_sanity_check_end")
OF_MODULES = (
    *OF_BOTH,
    *("prepare_data", "configure_model", "configure_callbacks"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
    *("optimizer_step", "backward", "configure_gradient_clipping", "lr_scheduler_step"),
    *("on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("on_test_model_eval", "on_test_model_train", "on_predict_model_eval"),
)
"""All but those around clearing gradients, which docs/hooks.md has in another place."""


def described(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), pytest.approx(value.detach().float().sum().item(), abs=1e-5)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    if isinstance(value, list):
        return [described(item) for item in value]
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-5)
    if isinstance(value, (int, str)) or value is None:
        return str(getattr(value, "value", value))  # a stage is an enumeration in Lightning
    return "optimizer" if isinstance(value, torch.optim.Optimizer) else callable(value)


def recording(events, who, hook, original, skipped):
    def call(self, *arguments, **named):
        values = (*arguments[skipped:], *named.values())
        if hook == "configure_gradient_clipping":
            values = values[:2]  # where no algorithm is chosen, it is None there, and "norm" here
        events.append((f"{who}.{hook}", [described(value) for value in values]))
        return original(self, *arguments, **named)

    return call


def run(library, module_class, folder, *, loaders=1, plateau=False, **arguments):
    """Fit, validate, test and predict with a library; return its events, the results and the position."""
    events = []

    class Net(module_class):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch).square().mean()
            self.log("train", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            loss = self.layer(batch).square().mean()
            self.log("val", loss)
            return {"value": loss, "index": batch_idx} if batch_idx else loss

        test_step = validation_step

        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return self.layer(batch)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            if plateau:
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def train_dataloader(self):
            return DataLoader(torch.arange(16.0).reshape(8, 2), batch_size=2)

        def val_dataloader(self):
            of_five = [DataLoader(torch.arange(10.0).reshape(5, 2), batch_size=2) for _ in range(loaders)]
            return of_five[0] if loaders == 1 else of_five

        test_dataloader = predict_dataloader = val_dataloader

    class Watch(library.Callback):
        pass

    for hook in OF_MODULES:
        setattr(Net, hook, recording(events, "module", hook, getattr(Net, hook), 0))
    for hook in OF_CALLBACKS:
        setattr(Watch, hook, recording(events, "callback", hook, getattr(Watch, hook), 2))
    torch.manual_seed(0)
    checkpoints = library.callbacks.ModelCheckpoint(
        dirpath=folder, monitor="val" if loaders == 1 else "val/dataloader_idx_0"
    )
    trainer = library.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch(), checkpoints],
        gradient_clip_val=0.5,
        **arguments,
    )
    net = Net()
    trainer.fit(net)
    position = [trainer.current_epoch, trainer.global_step, trainer.is_last_batch, trainer.estimated_stepping_batches]
    values = {key: described(value) for key, value in sorted(trainer.callback_metrics.items())}
    best = checkpoints.best_model_path.split("/")[-1]
    results = [trainer.validate(net, verbose=False), trainer.test(net, verbose=False), trainer.predict(net)]
    return events, [position, values, best, described(results)]


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"loaders": 2}, {"plateau": True}, {"val_check_interval": 2}],
    ids=str,
)
def test_every_hook_is_called_when_and_with_what_lightning_calls_it(tmp_path, options):
    logging.disable(logging.WARNING)
    theirs, their_results = run(lightning, lightning.LightningModule, tmp_path / "theirs", **options)
    ours, our_results = run(dstrat, dstrat.TrainModule, tmp_path / "ours", **options)
    logging.disable(logging.NOTSET)
    assert len(theirs) > 200
    for number, (their_event, our_event) in enumerate(zip(theirs, ours, strict=False)):
        assert our_event == their_event, f"event {number}, after {[name for name, _ in theirs[number - 3 : number]]}"
    assert len(ours) == len(theirs)
    assert our_results == their_results
