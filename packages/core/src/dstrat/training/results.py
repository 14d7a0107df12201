"""Result of a run, sent back to the process that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.data.random_state import RandomState
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.training.callbacks.defaults import with_callbacks_of
from dstrat.training.module.loading import configure_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDelta:
    """The state that a run has changed, from global rank 0, with tensors on the CPU.

    Attributes:
        weights: The module's state; None if the run did not train.
        counters: The state of the training loop.
        num_training_batches: Number of training batches in an epoch; None if it is unknown.
        ckpt_path: The checkpoint that the run has loaded; None without one.
        world_size: Number of processes at the end.
        metrics: The logged values.
        callbacks: The states of the callbacks, by their keys.
        hparams: The module's hyperparameters that are plain values.
        random_state: The state of the random generators.
    """

    weights: dict[str, Any] | None
    counters: dict[str, int]
    num_training_batches: int | None
    ckpt_path: str | None
    world_size: int
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
    def of(cls, run: Run, result: Any, *, stopped_by: int = 0) -> RunResult:
        """Collect the result of a run; collective."""
        if not run.ran_elsewhere:
            return cls(result=result)
        # A collective of all ranks, before the others return.
        weights = run.strategy.module_state_dict() if run.is_fitting else None
        if not run.is_global_zero:
            return cls(result=None)
        changes = StateDelta(
            weights=_on_cpu(weights),
            counters=run.fit_loop.state_dict(),
            num_training_batches=run.fit_loop.data.num_batches,
            ckpt_path=run.ckpt_path,
            world_size=run.world_size,
            metrics=run.metrics.state_dict(),
            callbacks={callback.state_key: _on_cpu(callback.state_dict()) for callback in run.called_callbacks},
            # Other values may be large, or impossible to pickle; the caller's module has them.
            hparams={name: value for name, value in run.strategy.module.hparams.items() if _is_plain(value)},
            random_state=RandomState.capture(),  # the caller continues as after a run in its own process
        )
        return cls(result=_on_cpu(result), changes=changes, stopped_by=stopped_by)

    def restore(self, run: Run) -> None:
        """Restore the changes of another process in this one.

        Raises:
            MisuseError: The run has made layers that this process's module lacks; everything else is restored.
        """
        if self.changes is None:
            return
        module = run.module
        run.fit_loop.load_state_dict(self.changes.counters)
        run.fit_loop.data.num_batches = self.changes.num_training_batches
        run.ckpt_path, run.final_world_size = self.changes.ckpt_path, self.changes.world_size
        run.metrics.load_state_dict(self.changes.metrics)
        # The run has done so in its copy of the Trainer.
        run.trainer.callbacks = with_callbacks_of(module, run.callbacks)
        for callback in run.callbacks:
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
