"""What is in a checkpoint of a training, and how a run continues from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.background import AsyncCheckpointIO
from dstrat.builtin.checkpoint.formats import io_for
from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
from dstrat.builtin.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import CheckpointError
from dstrat.training.loops.continuation import moved_state
from dstrat.training.module.hyperparameters import DATAMODULE_KEYS, MODULE_KEYS, checkpoint_entries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.training.trainer import Trainer

CHECKPOINT_VERSION = 2

_log = logging.getLogger(__name__)


def collect_checkpoint(trainer: Trainer, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the state of a training as a dict of tensors and plain values; collective.

    Args:
        trainer: In a run.
        weights_only: Whether everything but the module's weights and the hyperparameters is left out.

    Raises:
        CheckpointError: A hyperparameter is not plain.
    """
    checkpoint = _weights(trainer)
    if not weights_only:
        checkpoint |= _training(trainer)
        if trainer.is_fitting:
            checkpoint |= _of_each_rank(trainer)
    trainer.dispatch.call("on_save_checkpoint", checkpoint)
    return checkpoint


def rescue_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint to a file from this process alone, when the others may be gone; nothing communicates.

    What each of the others had for itself, such as its random numbers, is not in it.

    Args:
        trainer: Of a broken run, whose strategy replicates the state.
        path: The file to write.
    """
    io = trainer.strategy.checkpoint_io
    checkpoint = _weights(trainer) | _training(trainer)
    if trainer.world_size == 1:
        checkpoint |= _of_each_rank(trainer)
    trainer.dispatch.call("on_save_checkpoint", checkpoint)
    writes_alone = trainer.world_size == 1 or not io.is_collective
    (io if writes_alone else TorchCheckpointIO()).save_checkpoint(checkpoint, path)


def _weights(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    is_sharded = strategy.checkpoint_io.is_collective and not strategy.replicates_state
    state = strategy.sharded_module_state() if is_sharded else strategy.module_state_dict()
    return {
        "dstrat_checkpoint_version": CHECKPOINT_VERSION,
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "strategy": trainer.plan.strategy,
        "state_dict": _own_part(trainer, state),
        **checkpoint_entries(trainer.module, MODULE_KEYS),
        **checkpoint_entries(trainer.datamodule, DATAMODULE_KEYS),
    }


def _own_part(trainer: Trainer, state: dict[str, Any]) -> dict[str, Any]:
    """Return what this process saves of a module's state: buffers, which may differ, are those of global rank 0."""
    if trainer.is_global_zero:
        return state
    buffers = {name for name, _ in trainer.strategy.module.named_buffers(remove_duplicate=False)}
    return {name: value for name, value in state.items() if name not in buffers}


def _training(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    optimizers: dict[str, Any]
    if strategy.checkpoint_io.is_collective:
        optimizers = {"optimizers": [strategy.sharded_optimizer_state(optimizer) for optimizer in strategy.optimizers]}
    else:
        optimizers = {"optimizer_states": [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]}
    return {
        **optimizers,
        "world_size": trainer.world_size,
        "loops": trainer.fit_loop.state_dict(),
        "metrics": trainer.metrics.state_dict(),
        "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_schedulers],
        "precision": strategy.precision_plugin.state_dict(),
        "strategy": {"name": type(strategy).__name__, "state": strategy.state_dict()},
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
        "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
    }


def _of_each_rank(trainer: Trainer) -> dict[str, Any]:
    """Return what belongs to single processes: only this one's where each saves its own part; collective."""
    strategy = trainer.strategy
    own = {**trainer.fit_loop.rank_state(), "strategy": strategy.rank_state()}
    if strategy.checkpoint_io.is_collective:
        return {"per_rank": own}
    return {"ranks": [strategy.broadcast(own, src=rank) for rank in range(strategy.world_size)]}


def restore_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Load a checkpoint into a run that has been set up; in a fit with optimizer, schedulers and counters; collective.

    Raises:
        CheckpointError: It cannot be read, or does not fit this training.
    """
    io = io_for(path, trainer.strategy.checkpoint_io)
    template = _template(trainer) if io.is_collective and not trainer.strategy.replicates_state else None
    checkpoint = io.load_checkpoint(path) if template is None else io.load_into(path, template)
    if "state_dict" not in checkpoint:
        raise CheckpointError(f"{path} has no 'state_dict': it is not a checkpoint of a training")
    trainer.dispatch.call("on_load_checkpoint", checkpoint)
    if template is None:
        trainer.strategy.load_module_state_dict(checkpoint["state_dict"])
    _restore_states(trainer, checkpoint)
    if trainer.is_fitting:
        _restore_training(trainer, checkpoint, path)
        _restore_ranks(trainer, checkpoint, io, path)


def _template(trainer: Trainer) -> dict[str, Any]:
    """Return the tensors that this process holds of a sharded module and its optimizers, to be filled."""
    strategy = trainer.strategy
    template: dict[str, Any] = {"state_dict": strategy.sharded_module_state()}
    if trainer.is_fitting:
        template["optimizers"] = [strategy.optimizer_template(optimizer) for optimizer in strategy.optimizers]
    return template


def _restore_states(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give callbacks and data module their states, for evaluation too: some average weights, or split data."""
    states = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if trainer.datamodule is not None and "datamodule" in checkpoint:
        trainer.datamodule.load_state_dict(checkpoint["datamodule"])


def _restore_training(trainer: Trainer, checkpoint: Mapping[str, Any], path: str | Path) -> None:
    strategy = trainer.strategy
    if "loops" not in checkpoint:
        raise CheckpointError(
            f"{path} has weights only, and cannot continue a training: "
            "load the weights into the module, and call fit without ckpt_path"
        )
    is_named = "optimizers" in checkpoint
    states = checkpoint["optimizers" if is_named else "optimizer_states"]
    _same_number("optimizers", strategy.optimizers, states, path)
    _same_number("schedulers", strategy.lr_schedulers, checkpoint["lr_schedulers"], path)
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        load = strategy.load_sharded_optimizer_state if is_named else strategy.load_optimizer_state
        load(optimizer, state)
    for config, state in zip(strategy.lr_schedulers, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    strategy.precision_plugin.load_state_dict(checkpoint["precision"])
    if _is_of_this_strategy(trainer, checkpoint):
        strategy.load_state_dict(checkpoint["strategy"]["state"])
    elif checkpoint.get("strategy", {}).get("state") and trainer.is_global_zero:
        _log.warning(
            "%s has a state of %s, which %s begins without",
            path,
            checkpoint["strategy"]["name"],
            type(strategy).__name__,
        )


def _is_of_this_strategy(trainer: Trainer, checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a strategy of the same class has saved the checkpoint; another one begins without its state."""
    saved: str = checkpoint.get("strategy", {}).get("name", "")
    return saved == type(trainer.strategy).__name__


def _restore_ranks(trainer: Trainer, checkpoint: Mapping[str, Any], io: CheckpointIO, path: str | Path) -> None:
    """Go on where the checkpoint was saved: exactly on as many processes, as near to it as can be on others."""
    loop = trainer.fit_loop
    loop.load_state_dict(checkpoint["loops"])
    trainer.metrics.load_state_dict(checkpoint["metrics"])
    saved_by = checkpoint["world_size"]
    ranks = checkpoint.get("ranks", [])
    if saved_by == trainer.world_size:
        own = ranks[trainer.global_rank] if ranks else checkpoint.get("per_rank")
        if own is not None:
            loop.load_rank_state(own)
            if _is_of_this_strategy(trainer, checkpoint):
                trainer.strategy.load_rank_state(own["strategy"])
        return
    io = io.checkpoint_io if isinstance(io, AsyncCheckpointIO) else io
    if not ranks and isinstance(io, PortableCheckpointIO):
        ranks = [io.load_rank(path, rank) for rank in range(saved_by)]
    loop.scales_position = True
    if ranks:
        loop.load_rank_state(moved_state(ranks))
    if trainer.is_global_zero:
        _log.warning(
            "%s was saved by %d processes and is continued by %d: weights, optimizer and counters are the same; random "
            "numbers and running means start anew, and the data goes on at the same part of the epoch",
            path,
            saved_by,
            trainer.world_size,
        )


def _same_number(what: str, here: list[Any], saved: list[Any], path: str | Path) -> None:
    if len(here) != len(saved):
        raise CheckpointError(f"{path} has {len(saved)} {what}, and this training has {len(here)}")
