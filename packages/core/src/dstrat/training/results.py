"""Result of a run, sent back to the process that started it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.checkpoint.strategy_state import optimization_entries, refuse_used, unused_path
from dstrat.data.random_state import RandomState
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.training.callbacks.defaults import with_callbacks_of
from dstrat.training.checkpoint.save import collect_checkpoint, collect_rank_state
from dstrat.training.contexts import warn_if_slow
from dstrat.training.module.loading import configure_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDelta:
    """The state that a run has changed, from global rank 0, with tensors on the CPU.

    Attributes:
        weights: The module's state; None if the run did not train.
        counters: The state of the training loop.
        num_training_batches: Number of training batches in an epoch; None if it is unknown.
        ckpt_path: The checkpoint that the run has loaded; None without one.
        metrics: The logged values.
        callbacks: The states of the callbacks, by their keys.
        hparams: The module's hyperparameters that are plain values.
        random_state: The state of the random generators.
    """

    weights: dict[str, Any] | None
    counters: dict[str, int]
    num_training_batches: int | None
    ckpt_path: str | None
    metrics: dict[str, Any]
    callbacks: dict[str, dict[str, Any]]
    hparams: dict[str, Any]
    random_state: RandomState


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes:
        result: The return value of the Trainer's method.
        changes: The changed state; None if the run was in the calling process, and on ranks other than 0.
        stopped_by: Number of the signal that ended the run on all ranks; 0 without one.
    """

    result: Any
    changes: StateDelta | None = None
    stopped_by: int = 0

    @classmethod
    def of(cls, trainer: Trainer, result: Any, *, stopped_by: int = 0) -> RunResult:
        """Collect the result of a run; collective."""
        if not trainer.ran_elsewhere:
            return cls(result=result)
        # A collective of all ranks, before the others return.
        weights = trainer.strategy.module_state_dict() if trainer.is_fitting else None
        if not trainer.is_global_zero:
            return cls(result=None)
        changes = StateDelta(
            weights=_on_cpu(weights),
            counters=trainer.fit_loop.state_dict(),
            num_training_batches=trainer.num_training_batches,
            ckpt_path=trainer.ckpt_path,
            metrics=trainer.metrics.state_dict(),
            callbacks={callback.state_key: _on_cpu(callback.state_dict()) for callback in trainer.called_callbacks},
            # Other values may be large, or impossible to pickle; the caller's module has them.
            hparams={name: value for name, value in trainer.strategy.module.hparams.items() if _is_plain(value)},
            random_state=RandomState.capture(),  # the caller continues as after a run in its own process
        )
        return cls(result=_on_cpu(result), changes=changes, stopped_by=stopped_by)

    def restore(self, trainer: Trainer, module: TrainModule) -> None:
        """Restore the changes of another process in this one.

        Raises:
            MisuseError: The run has made layers that this process's module lacks; everything else is restored.
        """
        if self.changes is None:
            return
        trainer.fit_loop.load_state_dict(self.changes.counters)
        trainer.fit_loop.data.num_batches = self.changes.num_training_batches
        trainer.context.ckpt_path = self.changes.ckpt_path
        trainer.metrics.load_state_dict(self.changes.metrics)
        # The run has done so in its copy of the Trainer.
        trainer.callbacks = with_callbacks_of(module, trainer.callbacks)
        for callback in trainer.callbacks:
            if callback.state_key in self.changes.callbacks:
                callback.load_state_dict(self.changes.callbacks[callback.state_key])
        module.hparams.update(self.changes.hparams)
        self.changes.random_state.restore()
        if self.changes.weights is not None:
            _restore_weights(module, self.changes.weights)


def _on_cpu(state: Any) -> Any:
    return apply_to_tensors(state, Tensor.cpu)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _restore_weights(module: TrainModule, weights: Mapping[str, Any]) -> None:
    configure_for(module, weights)  # the run has called configure_model on its copy
    current = module.state_dict(keep_vars=True)
    for name, tensor in current.items():
        trained = weights.get(name)
        if isinstance(trained, Tensor) and isinstance(tensor, Tensor) and trained.dtype != tensor.dtype:
            tensor.data = tensor.data.to(trained.dtype)  # the precision has converted the run's copy
    module.load_state_dict(weights, strict=False)  # names that differ are an error, after all else is restored
    added, removed = ([name for name in a if name not in b] for a, b in ((weights, current), (current, weights)))
    if added or removed:
        changes = {"made": added, "removed": removed}
        changed = "; ".join(f"{verb} {', '.join(names)}" for verb, names in changes.items() if names)
        raise MisuseError(
            f"the run has {changed} in {type(module).__name__} in other processes, and in this one only the other "
            "weights are restored: make layers in __init__ or in configure_model, which is called here too, or choose "
            "a strategy that runs in this process"
        )


# Final state of a fit, on the CPU, for a checkpoint after the fit


_log = logging.getLogger(__name__)

_IN_A_RUN = "call it in on_train_end of the module or a callback, or use ModelCheckpoint(save_last=True)"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalState:
    """The state that the strategy frees at the end of a fit; module, counters and callbacks stay in the Trainer.

    Tensors are on the CPU.  On other devices they are copied to it, which takes as much host memory as the optimizers'
    state takes on the device (8 bytes per parameter for Adam in float32).  The Trainer's optimizers, which users may
    read after a fit, share these tensors.

    Attributes:
        optimization: The state of optimizers, schedulers and precision; empty in processes that do not write it.
        rank_state: The state of this rank.
        error: The error that prevents a checkpoint of the state; None without one.
        weights_of: The checkpoint whose weights an evaluation has since loaded into the module; None without one.
        loaded_by: The stage of that evaluation.
    """

    optimization: dict[str, Any]
    rank_state: dict[str, Any]
    error: Exception | None = None
    weights_of: str | Path | None = None
    loaded_by: str = ""

    @classmethod
    def of(cls, trainer: Trainer) -> FinalState | None:
        """Return the final state of a fit, before the strategy's teardown; None if it cannot be saved afterwards."""
        if not trainer.is_fitting or trainer.ran_elsewhere or _is_sharded(trainer):
            return None
        try:
            entries, rank_state = optimization_entries(trainer.strategy), collect_rank_state(trainer)
            if not trainer.is_global_zero and not trainer.strategy.checkpoint_io.is_collective:
                entries = {}  # only global rank 0 writes them
            to_host = trainer.strategy.to_host
            return cls(
                optimization=apply_to_tensors(entries, to_host), rank_state=apply_to_tensors(rank_state, to_host)
            )
        except Exception as error:  # noqa: BLE001 - the fit itself has succeeded; save raises the error if it is called
            return cls(optimization={}, rank_state={}, error=error)

    def with_weights_of(self, path: str | Path, stage: str) -> FinalState:
        """Return the final state after a stage has loaded the weights of a checkpoint into the module."""
        rank_state = {**self.rank_state, "buffers": {}}  # the module has the checkpoint's buffers now
        return replace(self, rank_state=rank_state, weights_of=path, loaded_by=stage)

    def save(self, trainer: Trainer, path: str | Path, *, weights_only: bool) -> None:
        """Write a checkpoint; collective, with a process group that is open for the save only."""
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
        # Again, as another Trainer may have run them since, and on_save_checkpoint reads their trainer.
        for attachable in (trainer.module, trainer.datamodule):
            if attachable is not None:
                attachable.attach(trainer)
        try:
            with warn_if_slow(trainer, "save_checkpoint"):
                strategy.setup_environment()
            target = unused_path(strategy, path)
            strategy.save_checkpoint(collect_checkpoint(trainer, weights_only=weights_only, ended=self), target)
            refuse_used(path, target)
        except BaseException as error:
            strategy.on_exception(error)  # closes communication, in which other ranks wait
            raise
        finally:
            strategy.teardown()


def nothing_to_save_error(trainer: Trainer) -> MisuseError:
    """Return the error of a save outside of a run without the final state of a fit."""
    if trainer.module is None:
        why = "there has been none: call it after fit, or in a hook of the module or a callback"
    elif trainer.ran_elsewhere:
        why = (
            f"the last run was in other processes (start_method={trainer.plan.start_method!r}), which have ended with "
            f"their optimizers: {_IN_A_RUN}"
        )
    elif _is_sharded(trainer):
        why = f"{type(trainer.strategy).__name__} has freed its shards of the state at the end of the run: {_IN_A_RUN}"
    elif not trainer.is_fitting:
        why = f"the last run was {trainer.stage} with a module that no fit has trained: call it after fit"
    else:
        why = "the last fit did not complete: use ModelCheckpoint(save_on_exception=True)"
    return MisuseError(f"save_checkpoint works during a run and after a fit, and {why}")


def _is_sharded(trainer: Trainer) -> bool:
    """Return whether the state is sharded, by the strategy or by an optimizer."""
    strategy = trainer.strategy
    # ZeroRedundancyOptimizer and its like have this method.
    has_shards = any(hasattr(optimizer, "consolidate_state_dict") for optimizer in strategy.optimizers)
    return not strategy.replicates_state or has_shards
