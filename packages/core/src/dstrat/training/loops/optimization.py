"""Automatic optimization: from a batch to the optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.training.dispatch import overrides
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dstrat.training.trainer import Trainer


class _NothingToLearnError(Exception):
    """``training_step`` returned None."""


class AutomaticOptimization:
    """Runs ``training_step``, backward, clipping and the optimizer's step, with the hooks between them.

    Everything that can be found out once is found out here, before the first batch.
    """

    def __init__(self, trainer: Trainer, module: TrainModule) -> None:
        strategy, dispatch = trainer.strategy, trainer.dispatch
        self._trainer, self._module, self._strategy = trainer, module, strategy
        self._optimizer = _only(strategy.optimizers)
        self._training_step = strategy.training_step
        self._takes_index = count_arguments(module.training_step) > 1
        self._zero_grad = module.optimizer_zero_grad if overrides(module, "optimizer_zero_grad", TrainModule) else None
        self._optimizer_step = module.optimizer_step if overrides(module, "optimizer_step", TrainModule) else None
        self._clips = trainer.gradient_clip_val is not None or overrides(
            module, "configure_gradient_clipping", TrainModule
        )
        self._before_zero_grad = dispatch.of("on_before_zero_grad")
        self._before_backward = dispatch.of("on_before_backward")
        self._after_backward = dispatch.of("on_after_backward")
        self._before_optimizer_step = dispatch.of("on_before_optimizer_step")
        self._batch: Any = None
        self._batch_idx = 0
        self._group_size = 1
        self._first = self._applies = True
        self._has_gradients = False
        self._outputs: Any = None

    def run(self, batch: Any, batch_idx: int, *, group_size: int, applies: bool) -> tuple[Any, bool]:
        """Train on a batch.

        Args:
            batch: The batch, on its device.
            batch_idx: Its index in the epoch.
            group_size: Number of batches whose gradients make up one optimizer step.
            applies: Whether it is the last of its group, after which the optimizer steps.

        Returns:
            What ``training_step`` returned, and whether the optimizer took a step.
        """
        self._batch, self._batch_idx = batch, batch_idx
        self._group_size, self._first, self._applies = group_size, not self._has_gradients, applies
        try:
            if applies or self._strategy.accumulates_gradients:
                self._step(self._closure)
            else:
                with self._strategy.no_backward_sync():
                    self._closure()
        except _NothingToLearnError:
            applies = applies and self._has_gradients
            if applies:
                self._step(self._prepare_step)
        finally:
            outputs, self._outputs, self._batch = self._outputs, None, None
        if applies:
            self._has_gradients = False
        return outputs, applies

    def _step(self, closure: Callable[[], Any]) -> None:
        if self._optimizer_step is None:
            self._strategy.optimizer_step(self._optimizer, closure, self._module)
        else:
            self._optimizer_step(self._trainer.current_epoch, self._batch_idx, self._optimizer, closure)

    def _closure(self) -> Tensor:
        if self._first:
            self._clear()
        args = (self._batch, self._batch_idx) if self._takes_index else (self._batch,)
        self._outputs = self._training_step(*args)
        loss = self._loss(self._outputs)
        for hook in self._before_backward:
            hook(loss)
        self._strategy.backward(loss)
        self._has_gradients = True
        for hook in self._after_backward:
            hook()
        if self._applies:
            self._prepare_step()
        return loss

    def _loss(self, outputs: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            return loss if self._group_size == 1 else loss / self._group_size
        if outputs is not None:
            raise MisuseError(
                f"training_step returned {type(outputs).__name__} without a loss: "
                "return the loss (a scalar tensor), or a dict with it as 'loss'"
            )
        if self._strategy.world_size > 1:
            raise MisuseError(
                f"training_step returned None on rank {self._strategy.global_rank} of {self._strategy.world_size}: "
                "the other ranks would wait for its gradients; return a loss, such as 0 * output.sum()"
            )
        raise _NothingToLearnError

    def _clear(self) -> None:
        for hook in self._before_zero_grad:
            hook(self._optimizer)
        if self._zero_grad is None:
            self._optimizer.zero_grad()
        else:
            self._zero_grad(self._trainer.current_epoch, self._batch_idx, self._optimizer)

    def _prepare_step(self) -> None:
        trainer = self._trainer
        self._strategy.unscale_gradients(self._optimizer)
        for hook in self._before_optimizer_step:
            hook(self._optimizer)
        if self._clips:
            self._module.configure_gradient_clipping(
                self._optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
            )


def _only(optimizers: list[Optimizer]) -> Optimizer:
    if len(optimizers) == 1:
        return optimizers[0]
    if not optimizers:
        raise MisuseError(
            "configure_optimizers returned no optimizer: return one, such as torch.optim.AdamW(self.parameters())"
        )
    raise MisuseError(
        f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps one: "
        "put the parameters into groups of a single optimizer"
    )


def count_arguments(step: Any) -> int:
    """Return how many of (batch, index of the batch, index of the loader) a step takes."""
    import inspect

    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(3, sum(parameter.kind in positional for parameter in parameters))
