"""Collection of the content of a training's checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import SAVED_WITH
from dstrat.checkpoint.strategy_state import gather_on_host, module_entries, optimization_entries, rank_buffers
from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.training.module.hyperparameters import DATAMODULE_KEYS, MODULE_KEYS, checkpoint_entries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.results import FinalState
    from dstrat.training.trainer import Trainer

CHECKPOINT_VERSION = 2  # of the entries below; the portable format and its files have versions of their own


def collect_checkpoint(
    trainer: Trainer, *, weights_only: bool = False, ended: FinalState | None = None
) -> dict[str, Any]:
    """Return the state of a training as a dict of tensors and plain values; collective.

    Args:
        trainer: In a run, or after a fit.
        weights_only: Whether the result has the module's weights and the hyperparameters only.
        ended: The final state of the fit, after its end.
    """
    checkpoint = _weights(trainer)
    if not weights_only:
        checkpoint |= _training(
            trainer, optimization_entries(trainer.strategy) if ended is None else ended.optimization
        )
        if trainer.is_fitting or ended is not None:
            checkpoint |= _of_each_rank(trainer, collect_rank_state(trainer) if ended is None else ended.rank_state)
    # On every rank, also where only rank 0 writes: a hook may call collectives.
    trainer.context.hooks.call("on_save_checkpoint", checkpoint)
    return checkpoint


def rescue_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Write a checkpoint from this process alone, without collectives, as other ranks may have ended.

    It has no states of other ranks, such as their random states.

    Args:
        trainer: Of a failed run, whose strategy replicates the state.
        path: The file to write.
    """
    io = trainer.strategy.checkpoint_io
    checkpoint = _weights(trainer) | _training(trainer, optimization_entries(trainer.strategy))
    if trainer.world_size == 1:
        checkpoint |= _of_each_rank(trainer, collect_rank_state(trainer))
    else:
        checkpoint["state_dict"] = trainer.strategy.module_state_dict()  # _weights leaves buffers to global rank 0
    trainer.context.hooks.call("on_save_checkpoint", checkpoint)
    # A collective checkpoint io would wait for ranks that have ended.
    writes_alone = trainer.world_size == 1 or not io.is_collective
    (io if writes_alone else TorchCheckpointIO()).save_checkpoint(checkpoint, path)


def _weights(trainer: Trainer) -> dict[str, Any]:
    return {
        "dstrat_checkpoint_version": CHECKPOINT_VERSION,
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        SAVED_WITH: trainer.plan.strategy_alias,
        **module_entries(trainer.strategy),
        **checkpoint_entries(trainer.module, MODULE_KEYS),
        **checkpoint_entries(trainer.datamodule, DATAMODULE_KEYS),
    }


def _training(trainer: Trainer, optimization: dict[str, Any]) -> dict[str, Any]:
    return {
        **optimization,
        "loops": trainer.fit_loop.state_dict(),
        "metrics": trainer.metrics.state_dict(),
        "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
        "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
    }


def collect_rank_state(trainer: Trainer) -> dict[str, Any]:
    """Return the state of this rank; collective."""
    of_strategy = trainer.strategy.rank_state()
    if trainer.fit_loop.is_in_backward and of_strategy.get("gradients"):
        of_strategy["gradients"] = {}  # a resume repeats the current batch, whose gradients are partly in them
    return {**trainer.fit_loop.rank_state(), "strategy": of_strategy, "buffers": rank_buffers(trainer.strategy)}


def _of_each_rank(trainer: Trainer, rank_state: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with the states of all ranks, or of this rank only if every rank saves; collective."""
    if trainer.strategy.checkpoint_io.is_collective:
        return {"per_rank": rank_state}
    return {"ranks": gather_on_host(trainer.strategy, rank_state)}


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
