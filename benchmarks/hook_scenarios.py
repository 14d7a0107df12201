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


def _data(framework: Framework, val_loaders: int = 1) -> Any:
    class Data(framework.data):  # type: ignore[name-defined, misc]  # a class that is known at run time
        def state_dict(self) -> dict[str, Any]:
            return {"position": 1}

        def train_dataloader(self) -> Any:
            return _loader()

        def val_dataloader(self) -> Any:
            return _loader(2) if val_loaders == 1 else [_loader(2) for _ in range(val_loaders)]

        def test_dataloader(self) -> Any:
            return _loader(2)

        def predict_dataloader(self) -> Any:
            return _loader(2)

    return framework.recorded("data", Data)()


def _automatic(framework: Framework) -> type:
    class Automatic(framework.module):  # type: ignore[name-defined, misc]  # a class that is known at run time
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch[0]).sum()
            self.log("train_loss", loss)
            if getattr(self, "breaks", False) and batch_idx == 1:
                raise ValueError("as asked")
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.layer(batch[0]).sum())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.layer(batch[0]).sum())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
            per_step = torch.optim.lr_scheduler.ConstantLR(optimizer)
            per_epoch = torch.optim.lr_scheduler.ConstantLR(optimizer)
            return [optimizer], [{"scheduler": per_step, "interval": "step"}, per_epoch]

    return Automatic


def _manual(framework: Framework) -> type:
    class Manual(framework.module):  # type: ignore[name-defined, misc]  # a class that is known at run time
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 1), nn.Linear(4, 1)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for layer, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                loss = layer(batch[0]).sum()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.one(batch[0]).sum())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=1e-3) for layer in (self.one, self.other)]

    return Manual


def _trainer(framework: Framework, folder: Path, **arguments: Any) -> Any:
    class WithState(framework.callback):  # type: ignore[name-defined, misc]  # a class that is known at run time
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    callbacks = [framework.recorded("callback", WithState)()]
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
    framework: Framework, folder: Path, module: Callable[[Framework], type] = _automatic, **arguments: Any
) -> None:
    """Fit for two epochs with a sanity check and a checkpoint, unless told otherwise."""
    data = _data(framework, arguments.pop("val_loaders", 1))
    trainer = _trainer(framework, folder, **{"max_epochs": 2, "num_sanity_val_steps": 1, "saves": True} | arguments)
    trainer.fit(framework.recorded("module", module(framework))(), datamodule=data)


def _break(framework: Framework, folder: Path) -> None:
    """Fit with a ``training_step`` that raises."""
    module = framework.recorded("module", _automatic(framework))()
    module.breaks = True
    with contextlib.suppress(ValueError):
        _trainer(framework, folder, max_epochs=1).fit(module, datamodule=_data(framework))


def _resume(framework: Framework, folder: Path) -> None:
    """Fit one more epoch from a checkpoint; the first fit isn't recorded."""
    _fit(framework, folder, max_epochs=1)
    framework.calls.clear()
    trainer = _trainer(framework, folder, max_epochs=2)
    module = framework.recorded("module", _automatic(framework))()
    trainer.fit(module, datamodule=_data(framework), ckpt_path=str(next((folder / "checkpoints").glob("last*"))))


def _evaluate(framework: Framework, folder: Path, method: str) -> None:
    """Validate, test or predict."""
    module = framework.recorded("module", _automatic(framework))()
    getattr(_trainer(framework, folder), method)(module, datamodule=_data(framework))


def _test_a_checkpoint(framework: Framework, folder: Path) -> None:
    """Test the weights of a checkpoint; the fit isn't recorded."""
    _fit(framework, folder, max_epochs=1)
    framework.calls.clear()
    module = framework.recorded("module", _automatic(framework))()
    path = str(next((folder / "checkpoints").glob("last*")))
    _trainer(framework, folder).test(module, datamodule=_data(framework), ckpt_path=path)


SCENARIOS: dict[str, Callable[[Framework, Path], None]] = {
    "fit, automatic": _fit,
    "fit, accumulating": partial(_fit, accumulate_grad_batches=2, gradient_clip_val=0.5),
    "fit, validation twice in an epoch": partial(_fit, val_check_interval=2, max_epochs=1, monitor="val_loss"),
    "fit, two validation loaders": partial(_fit, val_loaders=2, max_epochs=1),
    "fit, manual": partial(_fit, module=_manual),
    "fit, raising": _break,
    "resume": _resume,
    "validate": partial(_evaluate, method="validate"),
    "test": partial(_evaluate, method="test"),
    "predict": partial(_evaluate, method="predict"),
    "test a checkpoint": _test_a_checkpoint,
}
