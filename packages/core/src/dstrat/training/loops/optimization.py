"""Automatic optimization: the steps of a batch, and errors about its loss."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.training.hooks import hook_of, overrides
from dstrat.training.loops.steps import (
    bind_backward,
    bind_optimizer_step,
    bind_step,
    bind_unscaling,
    describe_peers,
    end_graph_after,
    steps_plainly,
)
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.optimizers import Optimization
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.run import Run
    from dstrat.training.settings import StepSettings


class OptimizerProxy:
    """A proxy of an optimizer for the user's module, whose ``step`` calls the strategy's.

    So precisions that scale losses, and strategies that average or shard gradients, take part in the step.

    Args:
        optimizer: An optimizer of ``configure_optimizers``.
        strategy: Steps the optimizer.
        module: The module with the optimizer's parameters.

    Attributes:
        optimizer: The optimizer itself.
    """

    is_proxy = True

    def __init__(self, optimizer: Optimizer, strategy: Strategy, module: Module) -> None:
        self.optimizer = optimizer
        self._strategy, self._module = strategy, module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer.

        Args:
            closure: Computes the loss and its gradients, and returns the loss.
            **kwargs: Arguments of the optimizer's ``step``.

        Returns:
            The result of the closure.
        """
        return self._strategy.optimizer_step(self.optimizer, closure or _nothing, self._module, **kwargs)

    @property  # type: ignore[misc]  # torch's schedulers require isinstance(optimizer, Optimizer)
    def __class__(self) -> type:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # unpickling looks up attributes before it sets any, and would recurse
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class NewOptimizers:
    """Settings of a fit whose optimizers are there already, as ``setup_optimizers`` of a strategy reads them.

    Args:
        steps: The other settings.
        optimization: The optimizers, and the schedulers.
    """

    def __init__(self, steps: StepSettings, optimization: Optimization) -> None:
        self.is_fitting = True
        self.accumulate_grad_batches = steps.accumulate_grad_batches
        self.gradient_clip_val = steps.gradient_clip_val
        self.gradient_clip_algorithm = steps.gradient_clip_algorithm
        self.configure_optimizers = lambda: optimization


def _nothing() -> None:
    """Do nothing: the gradients have been computed."""


# Automatic optimization


_log = logging.getLogger(__name__)


class _SkipBatch(Exception):  # noqa: N818 - not an error: it leaves the closure of an optimizer
    """``training_step`` returned None."""


class AutomaticOptimization:
    """The steps of automatic optimization for a batch.

    It clears gradients, and runs ``training_step``, backward, clipping and the optimizer's step, with their hooks.
    Look-ups are done here, or once in each epoch by :meth:`look_up`.  Gradients are cleared before the forward pass, so
    that old gradients and new activations are never in memory together.

    Args:
        run: Has the module, the strategy and the hooks.

    Attributes:
        is_in_backward: Whether a backward pass of the current batch has begun.
    """

    def __init__(self, run: Run) -> None:
        module, strategy, hooks = run.module, run.strategy, run.hooks
        self._run, self._module, self._strategy = run, module, strategy
        self._optimizer = _single(strategy.optimizers)
        self._backward = run.profiled("backward", bind_backward(strategy))
        self._unscale = bind_unscaling(strategy)
        self._optimizer_step = run.profiled(
            "optimizer_step", end_graph_after("optimizer_step", self._find_step(), strategy)
        )
        self._loop, self._weights = run.fit_loop, run.fit_loop.loss_weights
        self._zero_grad = self._find_zero_grad()
        self._configure_clipping = hook_of(module, "configure_gradient_clipping", TrainModule)
        self._before_zero_grad = hooks.of("on_before_zero_grad")
        self._before_backward = hooks.of("on_before_backward")
        self._after_backward = hooks.of("on_after_backward")
        self._before_optimizer_step = hooks.of("on_before_optimizer_step")
        self.look_up()
        # Gradients that training_step computes are not divided, and scaled before the step.
        self._divides = strategy.compiled_steps() is None
        strategy.weigh_batch = None if self._divides else self._weigh_early
        # State of the current batch, in attributes, so that one closure serves all batches.
        self._arguments: tuple[Any, ...] = ()
        self._divisor: float = 1
        self._weight: float = 1
        self._applies = True
        self._clears = True  # False while gradients accumulate
        self._outputs: Any = None
        self._has_warned = False
        self.is_in_backward = False

    def look_up(self) -> None:
        """Look up what users change between epochs: the module's ``training_step``, and clipping."""
        run, module = self._run, self._module
        self._training_step = run.profiled("training_step", bind_step(self._strategy, module, "training_step"))
        self._clips = bool(run.settings.steps.gradient_clip_val) or overrides(
            module, "configure_gradient_clipping", TrainModule
        )
        self._prepares = self._clips or bool(self._unscale or self._before_optimizer_step)

    def _find_step(self) -> Callable[[Callable[[], Any]], Any]:
        module, run, optimizer = self._module, self._run, self._optimizer
        if not overrides(module, "optimizer_step", TrainModule):
            return bind_optimizer_step(self._strategy, module, optimizer)
        # The user's method calls its step, which has to be the strategy's if that is not the optimizer's own.
        step_optimizer: Any = (
            optimizer if steps_plainly(self._strategy) else OptimizerProxy(optimizer, self._strategy, module)
        )
        return lambda closure: module.optimizer_step(
            run.fit_loop.epoch, run.fit_loop.batch_idx, step_optimizer, closure
        )

    def _find_zero_grad(self) -> Callable[[], None]:
        module, run, optimizer = self._module, self._run, self._optimizer
        if not overrides(module, "optimizer_zero_grad", TrainModule):
            return optimizer.zero_grad
        return lambda: module.optimizer_zero_grad(run.fit_loop.epoch, run.fit_loop.batch_idx, optimizer)

    def start_group(self, *, keeps_gradients: bool) -> None:
        """Keep the current gradients, such as those of a checkpoint, for the next optimizer step, or clear them."""
        self._clears = not keeps_gradients

    def run(self, arguments: tuple[Any, ...], *, applies: bool) -> Any:
        """Train on a batch; return the result of ``training_step``, with the loss divided by the group's divisor.

        Args:
            arguments: The arguments of ``training_step``.
            applies: Whether the optimizer steps after this batch, the last one of its group.
        """
        loop = self._loop
        self._arguments, self._applies = arguments, applies
        if applies and self._strategy.steps_with_other_jobs:
            self._weigh_before_average()
        self._divisor, self._weight = loop.group_divisor if self._divides else 1, loop.group_weight + 1
        try:
            # A strategy that accumulates by itself counts the batches in its optimizer's step.
            if applies or self._strategy.accumulates_gradients:
                self._optimizer_step(self._closure)
                if self._outputs is None:
                    raise closure_not_called_error(self._module, self._optimizer)
            else:
                with self._strategy.no_backward_sync():
                    self._closure()
            self._clears = False
            loop.group_weight = self._weight
        except _SkipBatch:
            self._warn_of_no_loss()
            loop.logged.weigh_batch(0.0 if self._weights.is_used else None)
            self._weight -= 1
            if applies and not self._clears:  # earlier batches of the group have gradients
                self._optimizer_step(self._prepare_step)
        except RuntimeError as error:
            # Only when torch has failed: a check of each loss would take time in every step.
            if (explained := unusable_loss_error(self._outputs, self._module)) is not None:
                raise explained from error
            raise
        finally:  # the batch and its graph must not stay in memory during the next forward pass
            outputs, self._outputs, self._arguments = self._outputs, None, ()
        self.is_in_backward = False
        if applies:
            self._clears = True
            loop.group_weight = 0
            loop.global_step += 1
        return outputs if self._divides else with_divided_loss(outputs, loop.group_divisor)

    def _weigh_before_average(self) -> None:
        """Let the gradients of a group become the mean of its batches before the last of these is added.

        The average over jobs follows that one.  A job that has joined within a group has fewer batches than others,
        and a factor after the average would be its alone.
        """
        loop = self._loop
        weight = loop.group_weight + 1
        if self._divides and weight != loop.group_divisor:
            self._strategy.scale_gradients(self._optimizer, loop.group_divisor / weight)
            loop.group_divisor = weight

    def skip_batch(self, *, applies: bool) -> None:
        """Skip a batch; if it is the last of its group, step with the gradients of the group's other batches."""
        if applies and not self._clears:
            self._divisor = self._loop.group_divisor if self._divides else 1
            self._weight = self._loop.group_weight
            self._optimizer_step(self._prepare_step)
            self._loop.group_weight = 0
            self._loop.global_step += 1
            self._clears = True

    def _closure(self) -> Tensor:
        if not torch.is_grad_enabled():  # the optimizer's step is under no_grad, and calls the closure there
            with torch.enable_grad():
                return self._closure()
        if self._outputs is not None and not self._divides:
            raise MisuseError(
                f"{type(self._optimizer).__name__} computes the loss of a batch several times in one step, between "
                "which it changes parameters by the gradients of all of them, and a rank of "
                f"{type(self._strategy).__name__} has those of its own layers: take another optimizer, or a layout "
                "without stages"
            )
        if self._clears:
            for hook in self._before_zero_grad:
                hook(self._optimizer)
            self._zero_grad()
        elif self._outputs is not None:  # the optimizer calls the closure again, and would add gradients twice
            raise MisuseError(
                f"{type(self._optimizer).__name__} computes the loss of a batch several times in one step, which "
                "cannot be combined with accumulate_grad_batches: leave that out"
            )
        self._outputs = self._training_step(*self._arguments)
        if self._divisor > 1:  # divided once, for hooks too: a lazy backend compiles each operation
            self._outputs = with_divided_loss(self._outputs, self._divisor)
        loss = self._loss(self._outputs)
        for hook in self._before_backward:
            hook(loss)
        self.is_in_backward = True
        self._backward(loss)
        for hook in self._after_backward:
            hook()
        if self._applies and (self._prepares or self._weight != self._divisor or self._weights.is_used):
            self._prepare_step()
        return loss

    def _loss(self, outputs: Any) -> Tensor:
        """Return the loss whose gradients are to be computed: with its weight, if there is one."""
        loss, weight = outputs, None
        if isinstance(outputs, Mapping):
            loss, weight = outputs.get("loss"), outputs.get("weight")
        if isinstance(loss, Tensor):
            is_weighed = weight is not None and not self._divides  # by _weigh_early
            if is_weighed or (weight is None and self._weights.is_used is False):
                return loss
            return self._weigh(loss, weight)
        if outputs is not None:
            raise no_loss_error(outputs)
        if peers := describe_peers(self._strategy):
            raise MisuseError(
                f"training_step returned None {peers} would wait for its gradients; return a loss, such as "
                "0 * output.sum()"
            )
        raise _SkipBatch

    def _weigh(self, loss: Tensor, weight: Any) -> Tensor:
        self._weights.agree(
            has_weight=weight is not None,
            caller="training_step returned",
            batch=f"batch {self._loop.batch_idx}",
            advice="return {'loss': loss, 'weight': n}",
        )
        weighted = loss if weight is None else self._weights.scale(loss, weight, is_first=self._clears)
        self._loop.logged.weigh_batch(weight)
        return weighted

    def _weigh_early(self, weight: Tensor) -> Tensor:
        """Return the factor of a loss whose gradients the strategy computes within ``training_step``."""
        return self._weigh(torch.ones_like(weight), weight)

    def _warn_of_no_loss(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "training_step of %s returned None: nothing is trained with such a batch, though it counts for "
                "global_step and schedulers; return the loss if that is not meant",
                type(self._module).__name__,
            )

    def _prepare_step(self) -> None:
        run = self._run
        factor: float | Tensor = self._divisor / self._weight  # the step is the mean of the batches that are in it
        if self._weights.is_used:
            factor = self._divisor * self._weights.correction()
        if isinstance(factor, Tensor) or factor != 1:
            self._strategy.scale_gradients(self._optimizer, factor)
        if self._unscale is not None:
            self._unscale(self._optimizer)
        for hook in self._before_optimizer_step:
            hook(self._optimizer)
        if self._clips:
            self._configure_clipping(
                self._optimizer,
                gradient_clip_val=run.settings.steps.gradient_clip_val,
                gradient_clip_algorithm=run.settings.steps.gradient_clip_algorithm,
            )


def with_divided_loss(outputs: Any, divisor: float) -> Any:
    """Return the result of ``training_step`` with its loss, if there is one, divided.

    Args:
        outputs: The result.
        divisor: Number of batches that are expected to accumulate into one optimizer step.
    """
    if isinstance(outputs, Tensor):
        return outputs / divisor
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        return {**outputs, "loss": outputs["loss"] / divisor}
    return outputs


def _single(optimizers: list[Optimizer]) -> Optimizer:
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


# Errors about the loss in the outputs of training_step


_FIX = "return the loss, a tensor with one element that depends on the parameters, or a dict with it as 'loss'"


def no_loss_error(outputs: Any) -> MisuseError:
    """Return the error about outputs whose loss is not a tensor."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return MisuseError(f"training_step returned a dict whose 'loss' is {_describe(outputs['loss'])}: {_FIX}")
    if isinstance(outputs, Mapping):
        keys = ", ".join(map(repr, outputs)) or "nothing"
        return MisuseError(f"training_step returned a dict with {keys} and without 'loss': {_FIX}")
    return MisuseError(f"training_step returned {_describe(outputs)}: {_FIX}")


def unusable_loss_error(outputs: Any, module: nn.Module) -> MisuseError | None:
    """Return the error about a loss without gradients; None for a usable loss.

    Args:
        outputs: The result of ``training_step``.
        module: The module of the step.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return None
    shape = f"a loss of shape {tuple(loss.shape)}"
    if loss.numel() != 1:
        return MisuseError(f"training_step returned {shape}: return one number, such as loss.mean()")
    if loss.is_complex():
        return MisuseError(f"training_step returned {shape} and {loss.dtype}: return a real number, such as loss.abs()")
    if loss.requires_grad:
        return None  # torch failed for another reason
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return MisuseError(
            f"training_step returned {shape} without gradients, as no parameter of {type(module).__name__} requires "
            "them: unfreeze some, by parameter.requires_grad_(True)"
        )
    return MisuseError(
        f"training_step returned {shape} that does not depend on the parameters, so that there are no gradients: "
        "look for detach(), item(), no_grad() or argmax() on the way from the layers to the loss"
    )


def closure_not_called_error(module: TrainModule, optimizer: Optimizer) -> MisuseError:
    """Return the error about an optimizer step that did not call the closure.

    Args:
        module: The module, which may override ``optimizer_step``.
        optimizer: Of the step.
    """
    if overrides(module, "optimizer_step", TrainModule):
        caller, advice = type(module).__name__, "call optimizer.step(closure=optimizer_closure) in it"
        method = "optimizer_step"
    else:
        caller, method = type(optimizer).__name__, "step"
        advice = (
            "call it there, or define optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure) in the "
            "module, which calls optimizer_closure() before optimizer.step()"
        )
    return MisuseError(
        f"{caller}.{method} did not call the closure, which computes the loss and its gradients, so that nothing would "
        f"be trained: {advice}"
    )


def _describe(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})" if isinstance(value, int | float | str) else type(value).__name__
