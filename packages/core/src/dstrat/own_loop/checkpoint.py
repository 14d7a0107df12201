"""Checkpoints of a hand-written loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.formats import io_for
from dstrat.checkpoint.paths import shown_path
from dstrat.checkpoint.portable.format import SAVED_WITH
from dstrat.checkpoint.strategy_state import (
    check_same_number,
    describe_move,
    is_of_same_strategy,
    job_sizes,
    load_rank_buffers,
    module_entries,
    optimization_entries,
    rank_buffers,
    rank_entries,
    read_checkpoint,
    reader_index,
    restore_optimization,
    state_to_follow,
    writable_path,
)
from dstrat.data.random_state import RandomState
from dstrat.errors import CheckpointError
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.request import Requested
from dstrat.resolve.selection import select

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.strategy import Strategy
    from dstrat.own_loop.loaders import EvaluationLoader, TrainingLoader

_log = logging.getLogger(__name__)


def save(
    strategy: Strategy,
    path: str | Path,
    state: Mapping[str, Any],
    loaders: Sequence[TrainingLoader],
    evaluation_loaders: Sequence[EvaluationLoader],
) -> None:
    """Save the module, optimizers, schedulers, position in the data, random state and a state of the loop; collective.

    Args:
        strategy: The strategy that has set up the module.
        path: A path at which nothing exists; otherwise it is saved beside, and that is an error.
        state: The loop's own state: plain values and tensors, the same in every process.
        loaders: The training loaders.
        evaluation_loaders: The evaluation loaders.
    """
    rank_state = _rank_state(strategy, loaders)
    checkpoint = {
        SAVED_WITH: select("strategy", Requested(value=strategy, source="strategy"), get_catalog()).alias,
        **module_entries(strategy),
        **optimization_entries(strategy),
        "own_loop": {
            "state": dict(state),
            "loaders": [loader.state_dict() for loader in loaders],
            "evaluation": [loader.seeds for loader in evaluation_loaders],
        },
        **rank_entries(strategy, rank_state),
    }
    with writable_path(strategy, path) as target:
        strategy.save_checkpoint(checkpoint, target)


def load(
    strategy: Strategy,
    path: str | Path,
    loaders: Sequence[TrainingLoader],
    evaluation_loaders: Sequence[EvaluationLoader],
) -> dict[str, Any]:
    """Restore module, optimizers, position in the data and random state from a checkpoint; collective.

    Returns:
        The loop's own state.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is not one of this loop's module and loaders.
    """
    io = io_for(path, strategy.checkpoint_io)
    checkpoint = read_checkpoint(strategy, io, path, has_optimizers=bool(strategy.optimizers))
    if "own_loop" not in checkpoint:
        raise CheckpointError(
            f"{str(path)!r} was not saved by OwnLoop.save_checkpoint: its weights are loaded, and it has no position "
            "in the data to continue at"
        )
    entry = checkpoint["own_loop"]
    # Not strict: older checkpoints lack the seeds, and the number of evaluation loaders may change.
    for evaluated, seeds in zip(evaluation_loaders, entry.get("evaluation", ()), strict=False):
        evaluated.share(seeds)
    if strategy.optimizers:  # a loop that only evaluates has no position in training data
        restore_optimization(strategy, checkpoint, path)
        check_same_number("training loaders", list(loaders), entry["loaders"], path)
        saved, now = job_sizes(strategy, checkpoint)
        readers = None if saved == now else (saved.readers, now.readers)
        for loader, position in zip(loaders, entry["loaders"], strict=True):
            loader.load_state_dict(position, readers=readers)
        _restore_ranks(strategy, checkpoint, io, path, loaders)
    return dict(entry["state"])


def _rank_state(strategy: Strategy, loaders: Sequence[TrainingLoader]) -> dict[str, Any]:
    """Return the state of this rank; collective."""
    return {
        "loaders": [loader.rank_state() for loader in loaders],
        "reader": reader_index(strategy),
        "strategy": strategy.rank_state(),
        "buffers": rank_buffers(strategy),
        "device_random": strategy.get_random_state(),
        "random": RandomState.capture().state_dict(),
    }


def _restore_ranks(
    strategy: Strategy,
    checkpoint: Mapping[str, Any],
    io: CheckpointIO,
    path: str | Path,
    loaders: Sequence[TrainingLoader],
) -> None:
    """Restore the state of this rank; in a job of another size, only the order of the data."""
    saved_size, size = job_sizes(strategy, checkpoint)
    is_exact = saved_size == size
    same = _saved_state_of(strategy.global_rank if is_exact else 0, checkpoint, io, path, is_of_this_rank=is_exact)
    if same is None:
        return
    saved = state_to_follow(strategy, io, path, checkpoint.get("ranks", ()), same) if is_exact else same
    for loader, state in zip(loaders, saved["loaders"], strict=True):
        loader.load_rank_state(state, is_exact=is_exact)
    if is_exact:
        load_rank_buffers(strategy, saved.get("buffers", {}))  # absent in older checkpoints
        if is_of_same_strategy(strategy, checkpoint):
            strategy.load_rank_state(same["strategy"])
        if saved["device_random"] is not None:
            strategy.set_random_state(saved["device_random"])
        RandomState.from_state_dict(saved["random"]).restore()  # last, as the steps above may draw numbers
    elif strategy.is_global_zero:
        _log.warning(
            "%s was saved by %s: weights, optimizer and counters are the same; random numbers start anew, and the data "
            "resumes at the same part of the epoch",
            shown_path(path),
            describe_move(saved_size, size),
        )


def _saved_state_of(
    rank: int, checkpoint: Mapping[str, Any], io: CheckpointIO, path: str | Path, *, is_of_this_rank: bool
) -> dict[str, Any] | None:
    """Return the saved state of a rank, of this one or another; None if the checkpoint io reads only this rank's."""
    if "ranks" in checkpoint:
        rank_state: dict[str, Any] = checkpoint["ranks"][rank]
        return rank_state
    if is_of_this_rank and "per_rank" in checkpoint:
        return checkpoint["per_rank"]  # type: ignore[no-any-return]  # the result of _rank_state
    return io.load_rank(path, rank)
