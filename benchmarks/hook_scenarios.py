"""Small runs that call every hook, written for dstrat and Lightning alike."""
# ruff: noqa: ARG002 - steps and hooks have the arguments that they are called with

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hook_recorder import Framework

BATCHES = 5


def _loader(batches: int = BATCHES) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2 * batches, 4)), batch_size=2)


class Data:
    """What the data module has; ``val_loaders`` is the number of validation loaders."""

    val_loaders = 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": 1}

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader(2) if self.val_loaders == 1 else [_loader(2) for _ in range(self.val_loaders)]

    def test_dataloader(self) -> Any:
        return _loader(2)

    def predict_dataloader(self) -> Any:
        return _loader(2)


class Automatic:
    """What the module has.

    Attributes:
        breaks: Whether the second training step raises.
        skips: Whether it returns None.
        leaves_out: Whether the hook before the third leaves out the rest of the epoch.
        monitors: Whether the scheduler watches a value.
    """

    breaks = skips = leaves_out = monitors = False
    log: Callable[..., None]
    parameters: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).sum()
        self.log("train_loss", loss)
        if self.breaks and batch_idx == 1:
            raise ValueError("as asked")
        return None if self.skips and batch_idx == 1 else loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.layer(batch[0]).sum())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch[0]).sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])

    def train_dataloader(self) -> Any:
        return _loader()

    def val_dataloader(self) -> Any:
        return _loader(2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.leaves_out and batch_idx == 2 else None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        if self.monitors:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}
        per_step = torch.optim.lr_scheduler.ConstantLR(optimizer)
        per_epoch = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": per_step, "interval": "step"}, per_epoch]


class Manual:
    """What a module has that steps two optimizers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        for layer, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = layer(batch[0]).sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.one(batch[0]).sum())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (self.one, self.other)]


class WithState:
    """What the callback has."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


def _trainer(framework: Framework, folder: Path, **arguments: Any) -> Any:
    callbacks = [framework.recorded("callback", WithState)]
    monitor = arguments.pop("monitor", None)
    if arguments.pop("saves", False):
        callbacks.append(framework.checkpoint(dirpath=str(folder / "checkpoints"), save_last=True, monitor=monitor))
    return framework.trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **arguments,
    )


def _fit(
    framework: Framework,
    folder: Path,
    module: type = Automatic,
    traits: dict[str, Any] | None = None,
    val_loaders: int = 1,
    **arguments: Any,
) -> None:
    """Fit for two epochs with a sanity check and a checkpoint, unless told otherwise.

    Args:
        framework: By which.
        folder: For checkpoints.
        module: Which.
        traits: Its attributes.
        val_loaders: Number of validation loaders of the data module; 0 does without one.
        **arguments: Of the Trainer.
    """
    data = framework.recorded("data", Data, val_loaders=val_loaders) if val_loaders else None
    trainer = _trainer(framework, folder, **{"max_epochs": 2, "num_sanity_val_steps": 1, "saves": True} | arguments)
    with contextlib.suppress(ValueError):  # which a module raises that breaks
        trainer.fit(framework.recorded("module", module, **traits or {}), datamodule=data)


def _resume(framework: Framework, folder: Path) -> None:
    """Fit one more epoch from a checkpoint; the first fit isn't recorded."""
    _fit(framework, folder, max_epochs=1)
    framework.calls.clear()
    _trainer(framework, folder, max_epochs=2).fit(
        framework.recorded("module", Automatic),
        datamodule=framework.recorded("data", Data),
        ckpt_path=str(next((folder / "checkpoints").glob("last*"))),
    )


def _evaluate(framework: Framework, folder: Path, method: str, **arguments: Any) -> None:
    """Validate, test or predict."""
    run = getattr(_trainer(framework, folder), method)
    run(framework.recorded("module", Automatic), datamodule=framework.recorded("data", Data), **arguments)


def _test_a_checkpoint(framework: Framework, folder: Path) -> None:
    """Test the weights of a checkpoint; the fit isn't recorded."""
    _fit(framework, folder, max_epochs=1)
    framework.calls.clear()
    _evaluate(framework, folder, "test", ckpt_path=str(next((folder / "checkpoints").glob("last*"))))


SCENARIOS: dict[str, Callable[[Framework, Path], None]] = {
    "fit, automatic": _fit,
    "fit, accumulating": partial(_fit, accumulate_grad_batches=2, gradient_clip_val=0.5),
    "fit, validation twice in an epoch": partial(_fit, val_check_interval=2, max_epochs=1, monitor="val_loss"),
    "fit, two validation loaders": partial(_fit, val_loaders=2, max_epochs=1),
    "fit, loaders of the module": partial(_fit, val_loaders=0, max_epochs=1),
    "fit, loaders made again": partial(_fit, reload_dataloaders_every_n_epochs=1),
    "fit, validation every second epoch": partial(_fit, check_val_every_n_epoch=2, saves=False),
    "fit, a scheduler that watches a value": partial(_fit, traits={"monitors": True}),
    "fit, a step without a loss": partial(_fit, traits={"skips": True}),
    "fit, the rest of the epoch left out": partial(_fit, traits={"leaves_out": True}, saves=False),
    "fit, manual": partial(_fit, module=Manual),
    "fit, raising": partial(_fit, traits={"breaks": True}, max_epochs=1),
    "resume": _resume,
    "validate": partial(_evaluate, method="validate"),
    "test": partial(_evaluate, method="test"),
    "predict": partial(_evaluate, method="predict"),
    "test a checkpoint": _test_a_checkpoint,
}
