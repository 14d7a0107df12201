"""Save of a training: during a run, after a fit, and from a failing rank."""

from __future__ import annotations

import logging
import os
from time import monotonic
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import SAVED_WITH
from dstrat.checkpoint.strategy_state import (
    gather_on_host,
    module_entries,
    optimization_entries,
    rank_buffers,
    rank_entries,
    reader_index,
    writable_path,
)
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.training.checkpoint.recovery import record_checkpoint
from dstrat.training.contexts import warn_if_slow
from dstrat.training.module.hyperparameters import DATAMODULE_KEYS, MODULE_KEYS, checkpoint_entries
from dstrat.training.run import FinalState, TrainerStatus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.run import Run

_log = logging.getLogger(__name__)

CHECKPOINT_VERSION = 2  # of the entries below; the portable format and its files have versions of their own


def save_checkpoint(run: Run, path: str | Path, *, weights_only: bool) -> None:
    """Write a checkpoint of a run in progress, or of the end of the last fit; collective.

    Raises:
        MisuseError: The state does not exist any more.
        CheckpointError: It cannot be written; or it was written beside another checkpoint in a store.
    """
    path = os.path.expanduser(path)  # noqa: PTH111 - may be a URL; a custom CheckpointIO may not expand it
    if run.is_running:
        # If a rank does not call it, the others wait here, where a warning says so, not in some later collective.
        with warn_if_slow(run, "save_checkpoint"):
            run.strategy.barrier("save_checkpoint")
        begin = monotonic()
        with writable_path(run.strategy, path) as target:
            if not weights_only:
                record_checkpoint(run, target)  # before it is written: a restart checks whether it is complete
            run.strategy.save_checkpoint(collect_checkpoint(run, weights_only=weights_only), target)
            run.save_seconds = monotonic() - begin
            if run.recorder is not None:
                run.recorder.note_checkpoint(run, str(target))
    elif run.final_state is not None:
        _save_final_state(run.final_state, run, path, weights_only=weights_only)
    else:
        raise _nothing_to_save_error(run)


def collect_checkpoint(run: Run, *, weights_only: bool = False, ended: FinalState | None = None) -> dict[str, Any]:
    """Return the state of a training as a dict of tensors and plain values; collective.

    Args:
        run: In a run, or after a fit.
        weights_only: Whether the result has the module's weights and the hyperparameters only.
        ended: The final state of the fit, after its end.
    """
    checkpoint = _weights(run)
    if not weights_only:
        checkpoint |= _training(run, optimization_entries(run.strategy) if ended is None else ended.optimization)
        if run.is_fitting or ended is not None:
            rank_state = collect_rank_state(run) if ended is None else ended.rank_state
            checkpoint |= rank_entries(run.strategy, rank_state)
    # On every rank, also where only rank 0 writes: a hook may call collectives.
    run.hooks.call("on_save_checkpoint", checkpoint)
    return checkpoint


def check_state_of_optimizers(run: Run) -> None:
    """Check that the checkpoints of a fit can hold what its optimizers and schedulers have at the start; collective.

    Otherwise the first save would raise the error, after an epoch.  State that a strategy or an optimizer shards is
    not gathered for that.

    Raises:
        CheckpointError: They have values of a type that no checkpoint holds.
    """
    strategy = run.strategy
    saves_state = any(not getattr(callback, "save_weights_only", False) for callback in run.checkpoint_callbacks)
    if saves_state and not _is_sharded(run):
        strategy.checkpoint_io.file_io.check_values(optimization_entries(strategy))


def rescue_checkpoint(run: Run, path: str | Path) -> None:
    """Write a checkpoint from this process alone, without collectives, as other ranks may have ended.

    It has no states of other ranks, such as their random states.

    Args:
        run: Of a failed run, whose strategy replicates the state.
        path: The file to write.
    """
    io = run.strategy.checkpoint_io
    checkpoint = _weights(run) | _training(run, optimization_entries(run.strategy))
    if run.world_size == 1:
        checkpoint |= rank_entries(run.strategy, collect_rank_state(run))
    else:
        checkpoint["state_dict"] = run.strategy.module_state_dict()  # _weights leaves buffers to global rank 0
    run.is_saved_alone = run.world_size > 1
    try:
        run.hooks.call("on_save_checkpoint", checkpoint)
    finally:
        run.is_saved_alone = False
    # A collective checkpoint io would wait for ranks that have ended.
    writes_alone = run.world_size == 1 or not io.is_collective
    (io if writes_alone else TorchCheckpointIO()).save_checkpoint(checkpoint, path)


def _weights(run: Run) -> dict[str, Any]:
    return {
        "dstrat_checkpoint_version": CHECKPOINT_VERSION,
        "epoch": run.fit_loop.epoch,
        "global_step": run.fit_loop.global_step,
        SAVED_WITH: run.plan.strategy_alias,
        **module_entries(run.strategy),
        **checkpoint_entries(run.module, MODULE_KEYS),
        **checkpoint_entries(run.datamodule, DATAMODULE_KEYS),
    }


def _training(run: Run, optimization: dict[str, Any]) -> dict[str, Any]:
    return {
        **optimization,
        "loops": run.fit_loop.state_dict(),
        "metrics": run.metrics.state_dict(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in run.callbacks},
        "datamodule": run.datamodule.state_dict() if run.datamodule else {},
    }


def collect_rank_state(run: Run) -> dict[str, Any]:
    """Return the state of this rank; collective."""
    of_strategy = run.strategy.rank_state()
    if run.fit_loop.is_in_backward and of_strategy.get("gradients"):
        of_strategy["gradients"] = {}  # a resume repeats the current batch, whose gradients are partly in them
    return {
        **run.fit_loop.rank_state(),
        "reader": reader_index(run.strategy),
        "strategy": of_strategy,
        "buffers": rank_buffers(run.strategy),
    }


def replace_rank_buffers(checkpoint: dict[str, Any], strategy: Strategy, buffers: Mapping[str, Tensor]) -> None:
    """Replace the buffers of ranks in a checkpoint; collective.

    Args:
        checkpoint: Changed in place, if it has states of ranks.
        strategy: Of the run.
        buffers: Those of this rank's training, while the strategy's module has others, such as averages.
    """
    if "per_rank" in checkpoint:
        checkpoint["per_rank"]["buffers"] = rank_buffers(strategy, buffers)
    elif "ranks" in checkpoint:
        of_ranks = gather_on_host(strategy, rank_buffers(strategy, buffers))
        for state, of_rank in zip(checkpoint["ranks"], of_ranks, strict=True):
            state["buffers"] = of_rank


# Final state of a fit, on the CPU, for a checkpoint after the fit


_IN_A_RUN = "call it in on_train_end of the module or a callback, or use ModelCheckpoint(save_last=True)"


def final_state_of(run: Run) -> FinalState | None:
    """Return the final state of a fit, before the strategy's teardown; None if it cannot be saved afterwards."""
    if not run.is_fitting or run.ran_elsewhere or _is_sharded(run):
        return None
    try:
        entries, rank_state = optimization_entries(run.strategy), collect_rank_state(run)
        if not run.is_global_zero and not run.strategy.checkpoint_io.is_collective:
            entries = {}  # only global rank 0 writes them
        to_host = run.strategy.to_host
        return FinalState(
            optimization=apply_to_tensors(entries, to_host), rank_state=apply_to_tensors(rank_state, to_host)
        )
    except Exception as error:  # noqa: BLE001 - the fit itself has succeeded; save raises the error if it is called
        return FinalState(optimization={}, rank_state={}, error=error)


def _save_final_state(final: FinalState, run: Run, path: str | Path, *, weights_only: bool) -> None:
    """Write a checkpoint; collective, with a process group that is open for the save only."""
    if final.error is not None and not weights_only:
        raise final.error
    if final.weights_of is not None and run.is_global_zero:
        _log.warning(
            "%s gets the weights of %s, which %s has loaded into the module%s",
            path,
            final.weights_of,
            final.loaded_by,
            "" if weights_only else ", and the optimizers of the end of the fit",
        )
    strategy = run.strategy
    # Again, as another Trainer may have run them since, and on_save_checkpoint reads their trainer.
    for attachable in (run.module, run.datamodule):
        if attachable is not None:
            attachable.attach(run.trainer)
    try:
        with warn_if_slow(run, "save_checkpoint"):
            strategy.setup_environment()
        with writable_path(strategy, path) as target:
            strategy.save_checkpoint(collect_checkpoint(run, weights_only=weights_only, ended=final), target)
    except BaseException as error:
        strategy.on_exception(error)  # closes communication, in which other ranks wait
        raise
    finally:
        strategy.teardown()


def _nothing_to_save_error(run: Run) -> MisuseError:
    """Return the error of a save outside of a run without the final state of a fit."""
    if run.status is TrainerStatus.INITIALIZING:
        why = "there has been none: call it after fit, or in a hook of the module or a callback"
    elif run.ran_elsewhere:
        why = (
            f"the last run was in other processes (start_method={run.plan.start_method!r}), which have ended with "
            f"their optimizers: {_IN_A_RUN}"
        )
    elif _is_sharded(run):
        why = f"{type(run.strategy).__name__} has freed its shards of the state at the end of the run: {_IN_A_RUN}"
    elif not run.is_fitting:
        why = f"the last run was {run.stage} with a module that no fit has trained: call it after fit"
    else:
        why = "the last fit did not complete: use ModelCheckpoint(save_on_exception=True)"
    return MisuseError(f"save_checkpoint works during a run and after a fit, and {why}")


def _is_sharded(run: Run) -> bool:
    """Return whether the state is sharded, by the strategy or by an optimizer."""
    strategy = run.strategy
    # ZeroRedundancyOptimizer and its like have this method.
    has_shards = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return not strategy.replicates_state or has_shards
