"""What is in a checkpoint of a training, and how a run continues from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError
from dstrat.training.module.hyperparameters import DATAMODULE_KEYS, MODULE_KEYS, checkpoint_entries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.training.trainer import Trainer

CHECKPOINT_VERSION = 1


def collect_checkpoint(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the state of a training as a dict of tensors and plain values; collective.

    Args:
        trainer: In a run.
        weights_only: Whether everything but the module's weights and the hyperparameters is left out.

    Raises:
        CheckpointError: A hyperparameter is not plain.
    """
    strategy = trainer.strategy
    checkpoint: dict[str, Any] = {
        "dstrat_checkpoint_version": CHECKPOINT_VERSION,
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "state_dict": strategy.module_state_dict(),
        **checkpoint_entries(trainer.module, MODULE_KEYS),
        **checkpoint_entries(trainer.datamodule, DATAMODULE_KEYS),
    }
    if not weights_only:
        checkpoint |= {
            "loops": trainer.fit_loop.state_dict(),
            "optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_schedulers],
            "precision": strategy.precision_plugin.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
        }
    trainer.dispatch.call("on_save_checkpoint", checkpoint)
    return checkpoint


def rescue_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint from this process alone, when the others may be gone; nothing in it communicates.

    Args:
        trainer: Of a broken run, whose strategy replicates the state.
        path: The file to write.
    """
    trainer.strategy.checkpoint_io.save_checkpoint(collect_checkpoint(trainer), path)


def restore_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Load a checkpoint into a run that has been set up; in a fit with optimizer, schedulers and counters.

    Raises:
        CheckpointError: It cannot be read, or does not fit this training.
    """
    checkpoint = trainer.strategy.load_checkpoint(path)
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} has no 'state_dict': it is not a checkpoint of a training")
    trainer.dispatch.call("on_load_checkpoint", checkpoint)
    trainer.strategy.load_module_state_dict(checkpoint["state_dict"])
    if trainer.is_fitting:
        _restore_training(trainer, checkpoint, path)


def _restore_training(trainer: Trainer, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    strategy = trainer.strategy
    if "loops" not in checkpoint:
        raise CheckpointError(
            f"{path} has weights only, and cannot continue a training: "
            "load the weights into the module, and call fit without ckpt_path"
        )
    _same_number("optimizers", strategy.optimizers, checkpoint["optimizer_states"], path)
    _same_number("schedulers", strategy.lr_schedulers, checkpoint["lr_schedulers"], path)
    trainer.fit_loop.load_state_dict(checkpoint["loops"])
    for optimizer, state in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=True):
        strategy.load_optimizer_state(optimizer, state)
    for config, state in zip(strategy.lr_schedulers, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    strategy.precision_plugin.load_state_dict(checkpoint["precision"])
    for callback in trainer.callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
    if trainer.datamodule is not None:
        trainer.datamodule.load_state_dict(checkpoint["datamodule"])


def _same_number(what: str, here: list[Any], saved: list[Any], path: str | Path) -> None:
    if len(here) != len(saved):
        raise CheckpointError(f"{path} has {len(saved)} {what}, and this training has {len(here)}")
