"""What a run brings back to the process that asked for it, when it ran in others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The state of global rank 0 at the end of a run.

    Attributes:
        result: What the Trainer's method returns.
        weights: The module's state on the CPU; None where the run did not change it.
        counters: The state of the training loop.
        metrics: The values that were logged.
        callbacks: The states of the callbacks, in their order.
    """

    result: Any
    weights: dict[str, Any] | None
    counters: dict[str, int]
    metrics: dict[str, float]
    callbacks: list[dict[str, Any]]

    @classmethod
    def of(cls, trainer: Trainer, result: Any) -> Outcome:
        """Collect the outcome; collective."""
        weights = None
        if trainer.is_fitting and trainer.ran_elsewhere:
            weights = {
                name: value.cpu() if isinstance(value, Tensor) else value
                for name, value in trainer.strategy.module_state_dict().items()
            }
        return cls(
            result=result,
            weights=weights,
            counters=trainer.fit_loop.state_dict(),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            callbacks=[callback.state_dict() for callback in trainer.callbacks],
        )

    def restore(self, trainer: Trainer, module: TrainModule) -> None:
        """Bring the outcome of another process into this one."""
        if self.weights is not None:
            module.load_state_dict(self.weights)
        trainer.fit_loop.load_state_dict(self.counters)
        trainer.metrics.take(self.metrics)
        for callback, state in zip(trainer.callbacks, self.callbacks, strict=True):
            callback.load_state_dict(state)
