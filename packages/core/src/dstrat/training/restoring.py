"""How a run continues from a checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.formats import io_for
from dstrat.builtin.checkpoint.strategy_state import (
    is_of_same_strategy,
    load_module,
    read_values,
    restore_optimization,
)
from dstrat.errors import CheckpointError
from dstrat.training.loops.continuation import moved_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class Restoration:
    """A checkpoint that a run goes on from, read and shown to the hooks before there are optimizers; collective.

    Args:
        trainer: In a run whose module is configured, and not yet set up by the strategy.
        path: The checkpoint.

    Raises:
        CheckpointError: It cannot be read, or is none of a training.
    """

    def __init__(self, trainer: Trainer, path: str | Path) -> None:
        self._trainer, self._path = trainer, path
        self._io = io_for(path, trainer.strategy.checkpoint_io)
        self._values = read_values(trainer.strategy, self._io, path)
        trainer.dispatch.call("on_load_checkpoint", self._values)

    def finish(self) -> None:
        """Load everything, in a fit with optimizers, schedulers and counters, when the strategy has set up; collective.

        Raises:
            CheckpointError: It does not fit this training.
        """
        trainer = self._trainer
        checkpoint = load_module(
            trainer.strategy, self._io, self._path, self._values, has_optimizers=trainer.is_fitting
        )
        _restore_states(trainer, checkpoint)
        if trainer.is_fitting:
            self._restore_training(checkpoint)

    def _restore_training(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was saved: exactly on as many processes, as near to it as can be on others."""
        if "own_loop" in checkpoint:
            raise CheckpointError(
                f"{self._path} was saved by OwnLoop.save_checkpoint, and a Trainer cannot continue that loop: go on "
                "with OwnLoop.load_checkpoint, or load the weights into the module and call fit without ckpt_path"
            )
        if "loops" not in checkpoint:
            raise CheckpointError(
                f"{self._path} has weights only, and cannot continue a training: "
                "load the weights into the module, and call fit without ckpt_path"
            )
        trainer = self._trainer
        restore_optimization(trainer.strategy, checkpoint, self._path)
        trainer.fit_loop.load_state_dict(checkpoint["loops"])
        trainer.metrics.load_state_dict(checkpoint["metrics"])
        if "converted_from" in checkpoint:
            self._tell_of_conversion(checkpoint["converted_from"])
        elif checkpoint["world_size"] == trainer.world_size:
            self._restore_rank(checkpoint)
        else:
            self._move(checkpoint)

    def _restore_rank(self, checkpoint: Mapping[str, Any]) -> None:
        trainer, ranks = self._trainer, checkpoint.get("ranks", [])
        own = ranks[trainer.global_rank] if ranks else checkpoint.get("per_rank")
        if own is not None:
            trainer.fit_loop.load_rank_state(own)
            if is_of_same_strategy(trainer.strategy, checkpoint):
                trainer.strategy.load_rank_state(own["strategy"])

    def _move(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what another number of processes had for themselves, as far as it belongs to all of them."""
        trainer, saved_by, ranks = self._trainer, checkpoint["world_size"], checkpoint.get("ranks", [])
        if not ranks:
            found = (self._io.load_rank(self._path, rank) for rank in range(saved_by))
            ranks = [own for own in found if own is not None]
        trainer.fit_loop.scales_position = True
        if ranks:
            trainer.fit_loop.load_rank_state(moved_state(ranks))
        if trainer.is_global_zero:
            _log.warning(
                "%s was saved by %d processes and is continued by %d: weights, optimizer and counters are the same; "
                "random numbers and running means start anew, and the data goes on at the same part of the epoch",
                self._path,
                saved_by,
                trainer.world_size,
            )

    def _tell_of_conversion(self, source: str) -> None:
        if self._trainer.is_global_zero:
            _log.warning(
                "%s comes from %s: weights, optimizers, schedulers and counters go on; random numbers start anew, and "
                "the data goes on at the beginning of epoch %d",
                self._path,
                source,
                self._trainer.current_epoch,
            )


def _restore_states(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give callbacks and data module their states, for evaluation too: some average weights, or split data."""
    states = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if trainer.datamodule is not None and "datamodule" in checkpoint:
        trainer.datamodule.load_state_dict(checkpoint["datamodule"])
