"""Automatic optimization: from the loss of a batch to the optimizer's step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.training.dispatch import hook_of, overrides
from dstrat.training.loops.loss import closure_not_called, no_loss, unusable_loss
from dstrat.training.loops.optimizer_proxy import OptimizerProxy
from dstrat.training.loops.steps import (
    bind_backward,
    bind_optimizer_step,
    bind_step,
    bind_unscaling,
    end_graph_after,
    steps_plainly,
)
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from dstrat.training.trainer import Trainer


_log = logging.getLogger(__name__)


class _NothingToLearnError(Exception):
    """``training_step`` returned None."""


class AutomaticOptimization:
    """Clears gradients, runs ``training_step``, backward, clipping and the optimizer's step, with the hooks between.

    Everything that can be found out once is found out here, before the first batch.  Gradients are cleared before
    the forward pass, so that old gradients and new activations are never held together.

    Args:
        trainer: Its strategy and hooks are used.
        module: The user's module.

    Attributes:
        optimizers: What the module's ``optimizers`` method returns.
        is_in_backward: Whether a backward pass has begun in a batch that is not done.
    """

    def __init__(self, trainer: Trainer, module: TrainModule) -> None:
        strategy, dispatch = trainer.strategy, trainer.dispatch
        self._trainer, self._module, self._strategy = trainer, module, strategy
        self.optimizers = strategy.optimizers
        self._optimizer = _only(strategy.optimizers)
        self._training_step = trainer.profiled("training_step", bind_step(strategy, module, "training_step"))
        self._backward = trainer.profiled("backward", bind_backward(strategy))
        self._unscale = bind_unscaling(strategy)
        self._optimizer_step = trainer.profiled(
            "optimizer_step", end_graph_after("optimizer_step", self._find_step(), strategy)
        )
        self._loop = trainer.fit_loop
        self._zero_grad = self._find_zero_grad()
        self._clips = trainer.gradient_clip_val is not None or overrides(
            module, "configure_gradient_clipping", TrainModule
        )
        self._configure_clipping = hook_of(module, "configure_gradient_clipping", TrainModule)
        self._before_zero_grad = dispatch.of("on_before_zero_grad")
        self._before_backward = dispatch.of("on_before_backward")
        self._after_backward = dispatch.of("on_after_backward")
        self._before_optimizer_step = dispatch.of("on_before_optimizer_step")
        self._prepares = self._clips or bool(self._unscale or self._before_optimizer_step)
        self._arguments: tuple[Any, ...] = ()
        self._group_size = 1
        self._applies = True
        self._clears = True  # until something has been accumulated
        self._outputs: Any = None
        self._has_warned = False
        self.is_in_backward = False

    def _find_step(self) -> Callable[[Callable[[], Any]], Any]:
        module, trainer, optimizer = self._module, self._trainer, self._optimizer
        if not overrides(module, "optimizer_step", TrainModule):
            return bind_optimizer_step(self._strategy, module, optimizer)
        given: Any = optimizer if steps_plainly(self._strategy) else OptimizerProxy(optimizer, self._strategy, module)
        return lambda closure: module.optimizer_step(trainer.current_epoch, trainer.fit_loop.batch_idx, given, closure)

    def _find_zero_grad(self) -> Callable[[], None]:
        module, trainer, optimizer = self._module, self._trainer, self._optimizer
        if not overrides(module, "optimizer_zero_grad", TrainModule):
            return optimizer.zero_grad
        return lambda: module.optimizer_zero_grad(trainer.current_epoch, trainer.fit_loop.batch_idx, optimizer)

    def start_group(self) -> None:
        """Clear the gradients before the next batch, also those that wait for a step in vain."""
        self._clears = True

    def go_on_accumulating(self) -> None:
        """Keep the gradients that there are for the next optimizer step, as those of a checkpoint."""
        self._clears = False

    def run(self, arguments: tuple[Any, ...], *, group_size: int, applies: bool) -> Any:
        """Train on a batch; return what ``training_step`` returned.

        Args:
            arguments: What ``training_step`` takes.
            group_size: Number of batches whose gradients make up one optimizer step.
            applies: Whether it is the last of its group, after which the optimizer steps.
        """
        self._arguments, self._group_size, self._applies = arguments, group_size, applies
        try:
            if applies or self._strategy.accumulates_gradients:
                self._optimizer_step(self._closure)
                if self._outputs is None:
                    raise closure_not_called(self._module, self._optimizer)
            else:
                with self._strategy.no_backward_sync():
                    self._closure()
            self._clears = False
        except _NothingToLearnError:
            self._warn_of_no_loss()
            if applies and not self._clears:  # earlier batches of the group have gradients
                self._optimizer_step(self._prepare_step)
        except RuntimeError as error:
            if (explained := unusable_loss(self._outputs, self._module)) is not None:
                raise explained from error
            raise
        finally:
            outputs, self._outputs, self._arguments = self._outputs, None, ()
        self.is_in_backward = False
        if applies:
            self._clears = True
            self._loop.global_step += 1
        return outputs

    def leave_out(self, *, applies: bool) -> None:
        """Step with the gradients of the group's other batches, if there are any and its last batch is left out."""
        if applies and not self._clears:
            self._optimizer_step(self._prepare_step)
            self._loop.global_step += 1
            self._clears = True

    def _closure(self) -> Tensor:
        if self._clears:
            for hook in self._before_zero_grad:
                hook(self._optimizer)
            self._zero_grad()
        elif self._outputs is not None:
            raise MisuseError(
                f"{type(self._optimizer).__name__} computes the loss of a batch several times in one step, which "
                "cannot be combined with accumulate_grad_batches: leave that out"
            )
        self._outputs = self._training_step(*self._arguments)
        loss = self._loss(self._outputs)
        for hook in self._before_backward:
            hook(loss)
        self.is_in_backward = True
        self._backward(loss)
        for hook in self._after_backward:
            hook()
        if self._applies and self._prepares:
            self._prepare_step()
        return loss

    def _loss(self, outputs: Any) -> Tensor:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            return loss if self._group_size == 1 else loss / self._group_size
        if outputs is not None:
            raise no_loss(outputs)
        if self._strategy.world_size > 1:
            raise MisuseError(
                f"training_step returned None on rank {self._strategy.global_rank} of {self._strategy.world_size}: "
                "the other ranks would wait for its gradients; return a loss, such as 0 * output.sum()"
            )
        raise _NothingToLearnError

    def _warn_of_no_loss(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "training_step of %s returned None: nothing is trained with such a batch, though it counts for "
                "global_step and schedulers; return the loss if that is not meant",
                type(self._module).__name__,
            )

    def _prepare_step(self) -> None:
        trainer = self._trainer
        if self._unscale is not None:
            self._unscale(self._optimizer)
        for hook in self._before_optimizer_step:
            hook(self._optimizer)
        if self._clips:
            self._configure_clipping(self._optimizer, trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


def _only(optimizers: list[Optimizer]) -> Optimizer:
    if len(optimizers) == 1:
        return optimizers[0]
    if not optimizers:
        raise MisuseError(
            "configure_optimizers returned no optimizer: return one, such as torch.optim.AdamW(self.parameters())"
        )
    raise MisuseError(
        f"configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization steps one: put the "
        "parameters into groups of a single optimizer, or set self.automatic_optimization = False and step them "
        "in training_step"
    )
