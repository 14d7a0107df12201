"""Manual optimization: backward passes and optimizer steps that training_step calls."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, MisuseError
from dstrat.parallel.optimizer_closures import closure_of_computed
from dstrat.training.loops.optimization import OptimizerProxy
from dstrat.training.loops.steps import bind_backward, bind_step, end_graph_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

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
        self._loop, self._weights = run.fit_loop, run.fit_loop.loss_weights
        self._run = run
        self.look_up()
        self._backward = bind_backward(run.strategy)
        self._before_backward = run.hooks.of("on_before_backward")
        self._after_backward = run.hooks.of("on_after_backward")
        self.optimizers = [ManualOptimizer(optimizer, run, self) for optimizer in run.strategy.optimizers]
        self.has_gradients = self.is_in_backward = False
        if run.is_global_zero:
            _warn_of_intervals(run.strategy.lr_schedulers, module)

    def look_up(self) -> None:
        """Look up the module's ``training_step``, which users change between epochs."""
        run = self._run
        self._training_step = run.profiled("training_step", bind_step(run.strategy, run.module, "training_step"))

    def run(self, arguments: tuple[Any, ...], *, applies: bool) -> Any:  # noqa: ARG002 - the module accumulates by itself
        """Train on a batch; return the result of ``training_step``.

        Args:
            arguments: The arguments of ``training_step``.
            applies: Always True.
        """
        outputs = self._training_step(*arguments)
        self.is_in_backward = False
        return outputs

    def backward(self, loss: Tensor, *args: Any, weight: Any = None, **kwargs: Any) -> None:
        """Compute the gradients of a loss, and call the hooks before and after."""
        if weight is not None or self._weights.is_used is not False:
            loss = self._weighted(loss, weight)
        for hook in self._before_backward:
            hook(loss)
        self.is_in_backward = True
        self._backward(loss, *args, **kwargs)
        self.has_gradients = True
        for hook in self._after_backward:
            hook()

    def _weighted(self, loss: Tensor, weight: Any) -> Tensor:
        """Return the loss with its weight, which counts for all optimizers that get gradients of it."""
        self._weights.agree(
            has_weight=weight is not None,
            caller="manual_backward got",
            batch=f"batch {self._loop.batch_idx}",
            advice="call self.manual_backward(loss, weight=n)",
        )
        if weight is None:
            return loss
        # A single one gets all, also if its parameters are flat copies that require no gradients.
        is_single = len(self.optimizers) == 1
        receiving = [optimizer for optimizer in self.optimizers if is_single or optimizer.receives_gradients]
        for optimizer in receiving:
            optimizer.check_weights()
        is_first = all(optimizer.total_weight is None for optimizer in self.optimizers)
        loss = self._weights.scale(loss, weight, is_first=is_first)
        for optimizer in receiving:
            optimizer.add_weight(self._weights.latest, is_first=is_first)
        return loss

    def weights_state(self) -> dict[str, float] | None:
        """Return the weights of the losses whose gradients have not been used, for a resume; None without any."""
        totals = {
            f"total_{index}": float(optimizer.total_weight)
            for index, optimizer in enumerate(self.optimizers)
            if optimizer.total_weight is not None
        }
        return {"reference": float(self._weights.reference), **totals} if totals else None

    def load_weights_state(self, state: Mapping[str, float], factor: float) -> None:
        """Restore the weights of the losses whose gradients were restored, which are multiplied by a factor."""
        for index, optimizer in enumerate(self.optimizers):
            total = state.get(f"total_{index}")
            if total is not None:
                self._weights.load_state_dict({"reference": state["reference"], "total": total}, factor)
                optimizer.add_weight(self._weights.total, is_first=False)

    def apply_weights(self, optimizer: Optimizer) -> None:
        """Scale the gradients of an optimizer to those of the weighted mean of its losses; collective."""
        for proxy in self.optimizers:
            if proxy.optimizer is optimizer:
                proxy.apply_weights()

    def end_weights(self, stepped: ManualOptimizer) -> None:
        """End the weighted mean of an optimizer that has stepped; others have the gradients of its losses still."""
        stepped.clear_weights()
        for optimizer in self.optimizers:
            optimizer.has_old_weights = optimizer.total_weight is not None


class ManualOptimizer(OptimizerProxy):
    """A proxy of an optimizer in manual optimization, whose steps call the hooks and count.

    Args:
        optimizer: An optimizer of ``configure_optimizers``.
        run: Has the strategy, which steps the optimizer.
        manual: The manual optimization of the module with the optimizer's parameters.

    Attributes:
        total_weight: The sum of the weights of the losses whose gradients it has, in this process; None without any.
        has_old_weights: Whether another optimizer has stepped since it got these gradients.
    """

    _module: TrainModule

    def __init__(self, optimizer: Optimizer, run: Run, manual: ManualOptimization) -> None:
        super().__init__(optimizer, run.strategy, manual.module)
        self._loop, self._manual = run.fit_loop, manual
        self._before_step = run.hooks.of("on_before_optimizer_step")
        self._step = end_graph_after("optimizer_step", super().step, run.strategy)
        self._weights = run.fit_loop.loss_weights
        self._factor_is_one = True
        self.total_weight: Tensor | None = None
        self.has_old_weights = False

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        def prepared() -> Any:  # called within the strategy's step, so that hooks get the closure's gradients unscaled
            loss = closure() if closure is not None else None
            if self.total_weight is not None:
                self.apply_weights()
            self._strategy.unscale_gradients(self.optimizer)
            for hook in self._before_step:
                hook(self.optimizer)
            return loss

        if closure is None:
            advice = "pass its step a closure that clears gradients, computes the loss and calls manual_backward"
            prepared = closure_of_computed(self.optimizer, advice, prepared)
        output = self._step(prepared, **kwargs)
        self._loop.global_step += 1
        self._manual.has_gradients = False
        if self._weights.is_used:
            self._manual.end_weights(self)
        return output

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and the weights of their losses; arguments go to the optimizer's ``zero_grad``."""
        self.optimizer.zero_grad(*args, **kwargs)
        if self.total_weight is not None:
            self.clear_weights()

    # Weights of the losses since the last step, or since the gradients were cleared

    @property
    def receives_gradients(self) -> bool:
        """Whether a parameter requires gradients: :meth:`toggle_model` of another optimizer turns that off."""
        return any(parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"])

    def check_weights(self) -> None:
        """Raise an error if the gradients may be of losses that another optimizer has stepped with.

        Raises:
            MisuseError: They may be.
        """
        if self.has_old_weights:
            index = self._manual.optimizers.index(self)
            raise MisuseError(
                f"manual_backward got a weight, and self.optimizers()[{index}] has gradients from before the step of "
                "another optimizer, with which they would be averaged: call its zero_grad() before, or let "
                "toggle_optimizer compute only the gradients that a step needs"
            )

    def add_weight(self, weight: Tensor, *, is_first: bool) -> None:
        """Add the weight of a loss to the total."""
        self._factor_is_one = is_first
        self.total_weight = weight if self.total_weight is None else self.total_weight + weight

    def apply_weights(self) -> None:
        """Scale the gradients to those of the weighted mean, before anything reads them; collective.

        It is called before clipping and by the step, and changes nothing the second time.
        """
        if self.total_weight is not None and not self._factor_is_one:
            self._strategy.scale_gradients(self.optimizer, self._weights.correction_of(self.total_weight))
            self._factor_is_one = True

    def clear_weights(self) -> None:
        """Forget the weights of the losses whose gradients were used, or cleared."""
        self.total_weight, self.has_old_weights = None, False

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Restrict gradients to this optimizer's parameters in a ``with`` block.

        Args:
            sync_grad: Whether gradients are synchronized between ranks in the block.
        """
        self._module.toggle_optimizer(self.optimizer)
        try:
            with self._module.no_backward_sync(enabled=not sync_grad):
                yield
        finally:
            self._module.untoggle_optimizer()


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
