"""Final state of a fit, kept on the CPU so that it can still be saved."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.training.checkpoint import collect_checkpoint, collect_rank_state
from dstrat.training.meeting import waiting_is_told

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)

_IN_A_RUN = "call it in on_train_end of the module or a callback, or take ModelCheckpoint(save_last=True)"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedFit:
    """What the strategy frees at the end of a fit; the module, the counters and the callbacks stay in the Trainer.

    Tensors are on the CPU.  Where the devices are others they are copies, which take as much memory of the host as the
    optimizers' state takes on the device (with Adam in float32 8 bytes per parameter).  The Trainer's optimizers, which
    users may read after a fit, share it.

    Attributes:
        optimization: The state of optimizers, schedulers and precision; empty in processes that do not write it.
        rank_state: What belongs to this process alone.
        error: What was wrong with the state, so that it cannot be saved; None where nothing was.
        weights_of: The checkpoint whose weights an evaluation has loaded into the module since; None where none has.
        loaded_by: The stage of that evaluation.
    """

    optimization: dict[str, Any]
    rank_state: dict[str, Any]
    error: Exception | None = None
    weights_of: str | Path | None = None
    loaded_by: str = ""

    @classmethod
    def of(cls, trainer: Trainer) -> EndedFit | None:
        """Return what is kept of a fit, before the strategy's teardown; None where there is nothing to save from."""
        if not trainer.is_fitting or trainer.ran_elsewhere or _is_sharded(trainer):
            return None
        from dstrat.builtin.checkpoint.strategy_state import optimization_entries

        try:
            entries, rank_state = optimization_entries(trainer.strategy), collect_rank_state(trainer)
            if not trainer.is_global_zero and not trainer.strategy.checkpoint_io.is_collective:
                entries = {}  # global rank 0 writes them alone
            to_host = trainer.strategy.to_host
            return cls(
                optimization=apply_to_tensors(entries, to_host), rank_state=apply_to_tensors(rank_state, to_host)
            )
        except Exception as error:  # noqa: BLE001 - what is kept for later fails no fit that has ended
            return cls(optimization={}, rank_state={}, error=error)

    def with_weights_of(self, path: str | Path, stage: str) -> EndedFit:
        """Return what is kept after a stage has loaded the weights of a checkpoint into the module."""
        rank_state = {**self.rank_state, "buffers": {}}  # a resume takes those of the module
        return replace(self, rank_state=rank_state, weights_of=path, loaded_by=stage)

    def save(self, trainer: Trainer, path: str | Path, *, weights_only: bool) -> None:
        """Write the checkpoint; every process of the job calls it, and they are connected until it is written."""
        if self.error is not None and not weights_only:
            raise self.error
        if self.weights_of is not None and trainer.is_global_zero:
            _log.warning(
                "%s gets the weights of %s, which %s has loaded into the module%s",
                path,
                self.weights_of,
                self.loaded_by,
                "" if weights_only else ", and the optimizers of the end of the fit",
            )
        strategy = trainer.strategy
        for attachable in (trainer.module, trainer.datamodule):
            if attachable is not None:
                attachable.attach(trainer)  # for on_save_checkpoint, as another Trainer may have run it since
        try:
            with waiting_is_told(trainer, "save_checkpoint"):
                strategy.setup_environment()
            strategy.save_checkpoint(collect_checkpoint(trainer, weights_only=weights_only, ended=self), path)
        except BaseException as error:
            strategy.on_exception(error)
            raise
        finally:
            strategy.teardown()


def no_end_to_save(trainer: Trainer) -> MisuseError:
    """Return the error of a checkpoint that is asked for outside of a run, where there is no end of a fit to save."""
    if trainer.module is None:
        why = "there has been none: call it after fit, or in a hook of the module or a callback"
    elif trainer.ran_elsewhere:
        why = (
            f"this one ran in other processes (start_method={trainer.plan.start_method!r}), which have ended with "
            f"their optimizers: {_IN_A_RUN}"
        )
    elif _is_sharded(trainer):
        why = (
            f"{type(trainer.strategy).__name__} has given up its part of the sharded state with the end of this one: "
            f"{_IN_A_RUN}"
        )
    elif not trainer.is_fitting:
        why = f"{trainer.stage} has run since with a module of which none has come to its end: call it after fit"
    else:
        why = "this one did not come to its end: take ModelCheckpoint(save_on_exception=True)"
    return MisuseError(f"save_checkpoint works during a run and after a fit, and {why}")


def _is_sharded(trainer: Trainer) -> bool:
    """Return whether no process has the whole state: of the strategy, or of an optimizer that is sharded by itself."""
    strategy = trainer.strategy
    has_parts = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return not strategy.replicates_state or has_parts
