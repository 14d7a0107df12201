"""Binding of steps: the shortest function for the work of strategy, precision and module in a step."""
# Methods that nobody overrides are skipped: each Python call between loop and module costs as much as a small kernel.

from __future__ import annotations

import inspect
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy
from dstrat.training.hooks import overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from dstrat.interfaces.accelerator import GraphEnd
    from dstrat.interfaces.strategy import StepName
    from dstrat.training.module.train_module import TrainModule

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def bind_step(strategy: Strategy, module: TrainModule, name: StepName) -> Callable[..., Any]:
    """Return the function that runs a step of the module.

    Raises:
        MisuseError: The step takes an iterator of batches, which Lightning passes for this name of its argument, or
            requires an argument that it does not get, such as the ``optimizer_idx`` of Lightning 1.
    """
    parameters = inspect.signature(getattr(module, name)).parameters
    if "dataloader_iter" in parameters:
        raise MisuseError(
            f"{type(module).__name__}.{name}(self, dataloader_iter) would get a batch, and no iterator: write "
            f"{name}(self, batch, batch_idx), and let the loader, or CombinedLoader, return what one step needs"
        )
    passed = 2 if name == "training_step" else 3
    if surplus := [parameter.name for parameter in parameters.values() if _is_required(parameter)][passed:]:
        several = "; with several optimizers set self.automatic_optimization = False, and step them in training_step"
        raise MisuseError(
            f"{type(module).__name__}.{name} requires {', '.join(surplus)}, and the Trainer passes "
            f"{', '.join(('batch', 'batch_idx', 'dataloader_idx')[:passed])}: leave it out"
            f"{several if 'optimizer_idx' in surplus else ''}"
        )
    step: Callable[..., Any]
    if overrides(strategy, name, Strategy):
        step = getattr(strategy, name)
    # A precision without autocast returns a null context, which need not be entered for each batch.
    elif overrides(strategy, "run_step", Strategy) or not isinstance(
        strategy.precision_plugin.forward_context(), nullcontext
    ):
        step = partial(strategy.run_step, name, getattr(module, name))
    else:
        step = getattr(module, name)
    # The graph of a training step goes on into the backward pass.
    return step if name == "training_step" else end_graph_after("evaluation_step", step, strategy)


def end_graph_after(end: GraphEnd, step: Callable[..., Any], strategy: Strategy) -> Callable[..., Any]:
    """Return a step after which a lazy accelerator ends its graph; the step itself on eager hardware."""
    accelerator = strategy.accelerator
    if not overrides(accelerator, "end_graph", Accelerator):
        return step

    def step_and_end(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        accelerator.end_graph(end)
        return output

    return step_and_end


def describe_peers(strategy: Strategy) -> str:
    """Return the place of this process and who waits for its gradients, for an error; empty if nobody does."""
    if strategy.world_size > 1:
        return f"on rank {strategy.global_rank} of {strategy.world_size}: the other ranks"
    if strategy.steps_with_other_jobs:
        return "in one of several jobs that train together: the others"
    return ""


def bind_backward(strategy: Strategy) -> Callable[..., None]:
    """Return the function that computes the gradients of a loss."""
    precision = strategy.precision_plugin
    is_changed = (
        strategy.module_backward is not None
        or overrides(strategy, "backward", Strategy)
        or overrides(precision, "backward", Precision)
        or overrides(precision, "scale_loss", Precision)
    )
    # Tensor.backward(loss) is loss.backward(), without a function in between.
    return end_graph_after("backward", strategy.backward if is_changed else Tensor.backward, strategy)


def bind_unscaling(strategy: Strategy) -> Callable[[Optimizer], None] | None:
    """Return the function that unscales the gradients of an optimizer; None if the loss is not scaled."""
    is_changed = overrides(strategy, "unscale_gradients", Strategy) or overrides(
        strategy.precision_plugin, "unscale_gradients", Precision
    )
    return strategy.unscale_gradients if is_changed else None


def bind_optimizer_step(
    strategy: Strategy, module: TrainModule, optimizer: Optimizer
) -> Callable[[Callable[[], Any]], Any]:
    """Return the function that runs a closure, which computes the gradients, and steps the optimizer."""
    if overrides(strategy, "optimizer_step", Strategy):
        return lambda closure: strategy.optimizer_step(optimizer, closure, module)
    step = strategy.precision_plugin.optimizer_step
    return lambda closure: step(optimizer, closure)


def steps_plainly(strategy: Strategy) -> bool:
    """Return whether neither strategy nor precision overrides the optimizer's step."""
    return not (
        overrides(strategy, "optimizer_step", Strategy)
        or overrides(strategy.precision_plugin, "optimizer_step", Precision)
    )


def count_arguments(step: Any) -> int:
    """Return the number of arguments that a step accepts, out of batch, index of the batch, index of the loader."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    return min(3, sum(parameter.kind in _POSITIONAL for parameter in parameters))


def requires_arguments(step: Any) -> int:
    """Return the number of positional arguments without a default of a step or hook."""
    return sum(map(_is_required, inspect.signature(step).parameters.values()))


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind in _POSITIONAL and parameter.default is parameter.empty
