"""Compiled training steps, in which a strategy computes gradients and steps the optimizer in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError
from dstrat.training.hooks import overrides
from dstrat.training.loops.optimization import with_divided_loss
from dstrat.training.loops.steps import bind_step
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import CompiledSteps
    from dstrat.training.run import Run

_HOOKS_WITHIN = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
_METHODS_WITHIN = ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")


class CompiledOptimization:
    """Optimization by a strategy with :meth:`compiled_steps`.

    No hook can run within such a step.  Hooks that would have to are an error here, before anything is compiled.

    Args:
        run: Has the module and the strategy.
        compiled: Numbers of batches and optimizer steps in one call.

    Attributes:
        is_in_backward: Always False.

    Raises:
        ConflictError: The module, a callback or an argument of the Trainer needs to run within the step.
    """

    is_in_backward = False  # no hook can save a checkpoint within the call

    def __init__(self, run: Run, compiled: CompiledSteps) -> None:
        _check(run, compiled)
        self._run = run
        self._training_step = run.profiled("training_step", bind_step(run.strategy, run.module, "training_step"))
        self._loop, self._steps = run.fit_loop, compiled.optimizer_steps
        self._accumulate, self._name = run.settings.steps.accumulate_grad_batches, type(run.strategy).__name__

    def run(self, arguments: tuple[Any, ...], *, applies: bool) -> Any:  # noqa: ARG002 - within the call
        """Train on the batches of one call; return the result of ``training_step``, with the loss divided as elsewhere.

        Args:
            arguments: The arguments of ``training_step``.
            applies: Always True.
        """
        outputs = self._training_step(*arguments)
        if isinstance(outputs, Mapping) and outputs.get("weight") is not None:
            raise ConflictError(
                f"training_step returned a weight with its loss, and {self._name} compiles each training step "
                "as a whole, without it: return the loss alone, or choose another strategy"
            )
        self._loop.global_step += self._steps
        return with_divided_loss(outputs, self._accumulate) if self._accumulate > 1 else outputs

    def check_position(self) -> None:
        """Check that a training can be resumed at the checkpoint's position.

        Raises:
            ConflictError: The checkpoint has accumulated gradients, or a number of steps that calls of several steps
                skip while ``max_steps`` or a scheduler depends on it.
        """
        run, name = self._run, self._name
        if self._loop.in_group:
            raise ConflictError(
                f"the checkpoint has gradients of {self._loop.in_group} accumulated batches, which {name} cannot take "
                "over: resume from one that was saved after an optimizer step"
            )
        has_schedulers = any(config.interval == "step" for config in run.strategy.lr_schedulers)
        counts = run.settings.limits.max_steps > 0 or has_schedulers
        if self._loop.global_step % self._steps and counts:
            raise ConflictError(
                f"the checkpoint was saved after {self._loop.global_step} optimizer steps, and {name} takes "
                f"{self._steps} in one call, so that max_steps and schedulers would be missed: resume from one after a "
                f"multiple of {self._steps} steps"
            )


def _check(run: Run, compiled: CompiledSteps) -> None:
    module, settings = run.module, run.settings.steps
    name, kind = type(run.strategy).__name__, type(module).__name__
    rule = f"{name} compiles each training step as a whole"
    if not module.automatic_optimization:
        raise ConflictError(
            f"{rule}, and {kind} has automatic_optimization=False: return the loss from training_step, and let the "
            "step of the optimizer be compiled with it, or choose another strategy"
        )
    if settings.detect_anomaly:
        raise ConflictError(f"{rule}, in which detect_anomaly=True cannot look at values: leave it out")
    methods = [f"{kind}.{method}" for method in _METHODS_WITHIN if overrides(module, method, TrainModule)]
    hooks = [hook for hook in _HOOKS_WITHIN if run.hooks.of(hook)]
    if within := [*methods, *(f"{hook} (of the module or a callback)" for hook in hooks)]:
        raise ConflictError(
            f"{rule}, so that {', '.join(within)} would never be called: leave that out, use on_train_batch_start or "
            "on_train_batch_end, or choose another strategy"
        )
    if settings.gradient_clip_val is not None and not compiled.clips_gradients:
        raise ConflictError(
            f"{rule}, without clipping, and gradient_clip_val={settings.gradient_clip_val!r}: leave it out, or choose "
            "another strategy"
        )
    # The strategy compiles its own number of batches into a call, which the Trainer's cannot change.
    if compiled.batches != compiled.optimizer_steps * settings.accumulate_grad_batches:
        raise ConflictError(
            f"{rule}, of {compiled.batches} batches and {compiled.optimizer_steps} optimizer steps, which does not go "
            f"together with accumulate_grad_batches={settings.accumulate_grad_batches}: use the strategy's own setting"
        )
    _check_steps(run, name, compiled.optimizer_steps)


def _check_steps(run: Run, name: str, steps: int) -> None:
    """Raise a ConflictError if ``max_steps`` or a scheduler would have to act between the optimizer steps of a call."""
    max_steps = run.settings.limits.max_steps
    if max_steps > 0 and max_steps % steps:
        raise ConflictError(
            f"max_steps={max_steps} cannot be met, as {name} takes {steps} optimizer steps in one call: "
            f"give a multiple of {steps}"
        )
    for config in run.strategy.lr_schedulers:
        if config.interval == "step" and config.frequency % steps:
            raise ConflictError(
                f"{type(config.scheduler).__name__} is stepped every {config.frequency} optimizer steps, and {name} "
                f"takes {steps} in one call with the same learning rate: give its config a frequency that is a "
                f'multiple of {steps}, or interval="epoch"'
            )
