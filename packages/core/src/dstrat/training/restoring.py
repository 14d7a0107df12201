"""Restoration of a run from a checkpoint."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.foreign import how_to_convert
from dstrat.builtin.checkpoint.formats import io_for
from dstrat.builtin.checkpoint.strategy_state import (
    is_of_same_strategy,
    load_module,
    load_rank_buffers,
    read_values,
    restore_optimization,
)
from dstrat.errors import CheckpointError
from dstrat.training.converted import SteppedSchedulers
from dstrat.training.loops.continuation import moved_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.training.trainer import Trainer

_BATCHES_LEFT_OUT = (
    "was saved between the batches of one optimizer step, which are left out, as their gradients cannot be taken"
)
_GRADIENTS_LEFT_OUT = "has gradients that the module had not cleared, which are left out, as they cannot be taken"

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
        elif trainer.ended_fit is not None:
            trainer.ended_fit = trainer.ended_fit.with_weights_of(self._path, trainer.stage)

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
        if "dstrat_checkpoint_version" not in checkpoint:
            raise CheckpointError(f"{self._path} was written by another program: {how_to_convert(self._path)}")
        trainer = self._trainer
        if "converted_from" in checkpoint and not checkpoint["lr_schedulers"]:
            schedulers = SteppedSchedulers(trainer, checkpoint["loops"])
            restore_optimization(trainer.strategy, {**checkpoint, "lr_schedulers": schedulers.states}, self._path)
            schedulers.set_rates()
        else:
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
        takes_state = is_of_same_strategy(trainer.strategy, checkpoint)
        left_out = _left_out(checkpoint, own, takes_state=takes_state)
        if own is None:
            self._tell(f"one of {trainer.world_size} processes alone", own, left_out)
            return
        trainer.fit_loop.load_rank_state(own)
        load_rank_buffers(trainer.strategy, own.get("buffers", {}))  # which older ones lack
        if takes_state:
            trainer.strategy.load_rank_state(own["strategy"])
        if left_out and trainer.is_global_zero:
            _log.warning("%s %s", self._path, left_out)

    def _move(self, checkpoint: Mapping[str, Any]) -> None:
        """Take what another number of processes had for themselves, as far as it belongs to all of them."""
        trainer, saved_by = self._trainer, checkpoint["world_size"]
        ranks = checkpoint.get("ranks") or self._saved_ranks(saved_by)
        trainer.fit_loop.scales_position = True
        first = ranks[0] if ranks else None
        if ranks:
            trainer.fit_loop.load_rank_state(moved_state(ranks))
        how = f"{saved_by} processes and is continued by {trainer.world_size}"
        self._tell(how, first, _left_out(checkpoint, first))

    def _tell(self, how: str, own: Mapping[str, Any] | None, left_out: str) -> None:
        """Log what is the same and what is not."""
        trainer = self._trainer
        if trainer.is_global_zero:
            _log.warning(
                "%s was saved by %s: weights, optimizer and counters are the same; random numbers and running means "
                "start anew, and the data goes on at the %s%s",
                self._path,
                how,
                f"beginning of epoch {trainer.current_epoch}" if own is None else "same part of the epoch",
                f"; it {left_out}" if left_out else "",
            )

    def _saved_ranks(self, saved_by: int) -> list[dict[str, Any]]:
        """Return what the processes had that saved; only the first one's where no gradients of the others are asked."""
        first = self._io.load_rank(self._path, 0)
        if first is None:
            return []
        others = range(1, saved_by) if first["gradients"] else ()
        loaded = (self._io.load_rank(self._path, rank) for rank in others)
        return [first, *(own for own in loaded if own is not None)]

    def _tell_of_conversion(self, source: str) -> None:
        if self._trainer.is_global_zero:
            _log.warning(
                "%s comes from %s: weights, optimizers, schedulers and counters go on; random numbers start anew, and "
                "the data goes on at the beginning of epoch %d",
                self._path,
                source,
                self._trainer.current_epoch,
            )


def _left_out(checkpoint: Mapping[str, Any], own: Mapping[str, Any] | None, *, takes_state: bool = False) -> str:
    """Return what is to be said of gradients that this run does not begin with; nothing where there are none.

    Args:
        checkpoint: What it goes on from.
        own: What a process had for itself, None where that is not known.
        takes_state: Whether the strategy goes on with the one's that saved.
    """
    are_kept = own is not None and bool(own["strategy"].get("gradients"))  # of a strategy that ``saves_gradients``
    if (own is not None and own["gradients"] is not None) or (are_kept and takes_state):
        return ""
    if checkpoint["loops"]["in_group"] > 0:
        return _BATCHES_LEFT_OUT
    return _GRADIENTS_LEFT_OUT if are_kept else ""  # in manual optimization, where a step that is done leaves some too


def _restore_states(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Give callbacks and data module their states, for evaluation too: some average weights, or split data."""
    states = checkpoint.get("callbacks", {})
    for callback in trainer.called_callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    if trainer.datamodule is not None and "datamodule" in checkpoint:
        trainer.datamodule.load_state_dict(checkpoint["datamodule"])
