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
    from dstrat.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What a run has changed in global rank 0; tensors are on the CPU.

    Attributes:
        weights: The module's state; None where the run did not train it.
        counters: The state of the training loop.
        num_training_batches: Number of training batches in an epoch, None where it is unknown.
        ckpt_path: The checkpoint that the run has begun with, None without one.
        metrics: The values that were logged.
        callbacks: The states of the callbacks, by their keys.
        hparams: The module's hyperparameters, as far as they are plain values.
        random_state: What the generators would draw next.
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
class Outcome:
    """The end of a run.

    Attributes:
        result: What the Trainer's method returns.
        changes: What the run has changed; None where it is here already, and in ranks that are not asked.
        stopped_by: Number of the signal on which all processes have ended the run together; 0 where none did.
    """

    result: Any
    changes: Changes | None = None
    stopped_by: int = 0

    @classmethod
    def of(cls, trainer: Trainer, result: Any, *, stopped_by: int = 0) -> Outcome:
        """Collect the outcome; collective."""
        if not trainer.ran_elsewhere:
            return cls(result=result)
        weights = trainer.strategy.module_state_dict() if trainer.is_fitting else None
        if not trainer.is_global_zero:
            return cls(result=None)
        changes = Changes(
            weights=_on_cpu(weights),
            counters=trainer.fit_loop.state_dict(),
            num_training_batches=trainer.num_training_batches,
            ckpt_path=trainer.ckpt_path,
            metrics=trainer.metrics.state_dict(),
            callbacks={callback.state_key: _on_cpu(callback.state_dict()) for callback in trainer.called_callbacks},
            hparams={name: value for name, value in trainer.strategy.module.hparams.items() if _is_plain(value)},
            random_state=RandomState.capture(),
        )
        return cls(result=_on_cpu(result), changes=changes, stopped_by=stopped_by)

    def restore(self, trainer: Trainer, module: TrainModule) -> None:
        """Bring the outcome of another process into this one.

        Raises:
            MisuseError: The run has made layers that the module here does not have; the rest is brought.
        """
        if self.changes is None:
            return
        trainer.fit_loop.load_state_dict(self.changes.counters)
        trainer.fit_loop.data.num_batches = self.changes.num_training_batches
        trainer.ckpt_path = self.changes.ckpt_path
        trainer.metrics.load_state_dict(self.changes.metrics)
        trainer.callbacks = with_callbacks_of(module, trainer.callbacks)  # as the run did, in its own copy
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
        return all(_is_plain(part) for part in (*value, *value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _restore_weights(module: TrainModule, weights: Mapping[str, Any]) -> None:
    configure_for(module, weights)  # as the run has done with its own copy
    here = module.state_dict(keep_vars=True)
    for name, tensor in here.items():
        other = weights.get(name)
        if isinstance(other, Tensor) and isinstance(tensor, Tensor) and other.dtype != tensor.dtype:
            tensor.data = tensor.data.to(other.dtype)  # the precision has converted the module
    module.load_state_dict(weights, strict=False)
    made, removed = ([name for name in a if name not in b] for a, b in ((weights, here), (here, weights)))
    if made or removed:
        found = {"made": made, "removed": removed}
        changed = "; ".join(f"{what} {', '.join(names)}" for what, names in found.items() if names)
        raise MisuseError(
            f"the run has {changed} in {type(module).__name__}, in other processes than this one, which lacks that and "
            "got the other weights: make layers in __init__ or in configure_model, which is called here too, or choose "
            "a strategy that runs in this process"
        )
