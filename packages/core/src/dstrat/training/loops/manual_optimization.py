"""Manual optimization: backward passes and optimizer steps that training_step calls."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError
from dstrat.training.loops.optimization import OptimizerProxy
from dstrat.training.loops.steps import bind_backward, bind_step, end_graph_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.optimizers import SchedulerConfig
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.run import Run
    from dstrat.training.settings import StepSettings

_log = logging.getLogger(__name__)


class ManualOptimization:
    """Manual optimization: ``training_step`` calls ``manual_backward`` and steps each :class:`ManualOptimizer`.

    Args:
        run: Has the module, whose ``automatic_optimization`` is False, the strategy and the hooks.

    Attributes:
        module: The module.
        optimizers: The result of the module's ``optimizers`` method.
        has_gradients: Whether gradients have been computed since the last step of an optimizer.
        is_in_backward: Whether a backward pass of the current batch has begun.

    Raises:
        ConflictError: The Trainer has arguments for clipping or accumulation.
    """

    def __init__(self, run: Run) -> None:
        module = self.module = run.module
        _check_arguments(run.settings.steps, module)
        self._training_step = run.profiled("training_step", bind_step(run.strategy, module, "training_step"))
        self._backward = bind_backward(run.strategy)
        self._before_backward = run.hooks.of("on_before_backward")
        self._after_backward = run.hooks.of("on_after_backward")
        self.optimizers = [ManualOptimizer(optimizer, run, self) for optimizer in run.strategy.optimizers]
        self.has_gradients = self.is_in_backward = False
        if run.is_global_zero:
            _warn_of_intervals(run.strategy.lr_schedulers, module)

    def run(self, arguments: tuple[Any, ...], *, applies: bool) -> Any:  # noqa: ARG002 - the module accumulates by itself
        """Train on a batch; return the result of ``training_step``.

        Args:
            arguments: The arguments of ``training_step``.
            applies: Always True.
        """
        outputs = self._training_step(*arguments)
        self.is_in_backward = False
        return outputs

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss, and call the hooks before and after."""
        for hook in self._before_backward:
            hook(loss)
        self.is_in_backward = True
        self._backward(loss, *args, **kwargs)
        self.has_gradients = True
        for hook in self._after_backward:
            hook()


class ManualOptimizer(OptimizerProxy):
    """A proxy of an optimizer in manual optimization, whose steps call the hooks and count.

    Args:
        optimizer: An optimizer of ``configure_optimizers``.
        run: Has the strategy, which steps the optimizer.
        manual: The manual optimization of the module with the optimizer's parameters.
    """

    _module: TrainModule

    def __init__(self, optimizer: Optimizer, run: Run, manual: ManualOptimization) -> None:
        super().__init__(optimizer, run.strategy, manual.module)
        self._loop, self._manual = run.fit_loop, manual
        self._before_step = run.hooks.of("on_before_optimizer_step")
        self._step = end_graph_after("optimizer_step", super().step, run.strategy)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        def prepared() -> Any:  # called within the strategy's step, so that hooks get the closure's gradients unscaled
            loss = closure() if closure is not None else None
            self._strategy.unscale_gradients(self.optimizer)
            for hook in self._before_step:
                hook(self.optimizer)
            return loss

        output = self._step(prepared, **kwargs)
        self._loop.global_step += 1
        self._manual.has_gradients = False
        return output

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Restrict gradients to this optimizer's parameters in a ``with`` block.

        Args:
            sync_grad: Whether gradients are synchronized between ranks in the block.
        """
        self._module.toggle_optimizer(self)
        try:
            with self._module.no_backward_sync(enabled=not sync_grad):
                yield
        finally:
            self._module.untoggle_optimizer(self)


def _warn_of_intervals(configs: Iterable[SchedulerConfig], module: TrainModule) -> None:
    for config in configs:
        configured = {"interval": config.interval, "frequency": config.frequency, "monitor": config.monitor}
        usual = {"interval": "epoch", "frequency": 1, "monitor": None}
        ignored = [f"{name}={value!r}" for name, value in configured.items() if value != usual[name]]
        if ignored:
            _log.warning(
                "%s of %s is ignored, as %s has automatic_optimization=False: call self.lr_schedulers().step() in it",
                ", ".join(ignored),
                type(config.scheduler).__name__,
                type(module).__name__,
            )


def _check_arguments(settings: StepSettings, module: TrainModule) -> None:
    arguments = {
        "gradient_clip_val": (settings.gradient_clip_val, None, "self.clip_gradients(optimizer, value)"),
        "accumulate_grad_batches": (settings.accumulate_grad_batches, 1, "stepping only in every n-th batch"),
    }
    for name, (value, default, instead) in arguments.items():
        if value != default:
            raise ConflictError(
                f"{name}={value!r} is for automatic optimization, and {type(module).__name__} has "
                f"automatic_optimization=False: leave it out, and do it in training_step, by {instead}"
            )
