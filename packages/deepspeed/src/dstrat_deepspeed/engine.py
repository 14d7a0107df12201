"""One engine of DeepSpeed around a module and its optimizer: steps, backward passes, updates, and the end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat_deepspeed.step_module import StepModule

_logger = logging.getLogger(__name__)


class Engine:
    """What a strategy does with DeepSpeed's engine.

    Args:
        deepspeed: The library.
        steps: What the engine wraps.
        optimizer: The user's; None evaluates only.
        config: DeepSpeed's configuration.
        is_manual: Whether the module computes gradients within its steps.

    Attributes:
        engine: DeepSpeed's own.
    """

    def __init__(
        self,
        deepspeed: Any,
        steps: StepModule,
        optimizer: Optimizer | None,
        config: dict[str, Any],
        *,
        is_manual: bool,
    ) -> None:
        self._steps = steps
        self._is_manual = is_manual
        self._clip_val: float | None = None
        self._has_gradients = False
        self.skipped_steps = 0
        self.engine, *_ = deepspeed.initialize(
            model=steps, optimizer=optimizer, config=config, dist_init_required=False
        )
        if optimizer is not None:
            self.engine.set_gradient_accumulation_boundary(True)
            self._take_over_zero_grad(optimizer)

    def _take_over_zero_grad(self, optimizer: Optimizer) -> None:
        """Let the user's optimizer clear the module's gradients; it holds shards of parameters now."""

        def zero_grad(set_to_none: bool = True) -> None:  # noqa: ARG001 - torch's signature
            if self._has_gradients:
                self.engine.optimizer.zero_grad()
                self._has_gradients = False

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def train(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a training step."""
        if self._is_manual:
            return self._steps(step, *args, **kwargs)
        return self.engine(step, *args, **kwargs)

    def evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step without gradients, for which parameters are gathered."""
        return self._steps(step, *args, **kwargs)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Compute gradients of a loss (a scalar tensor)."""
        self._has_gradients = True
        self.engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def set_boundary(self, is_boundary: bool) -> None:
        """Say whether the next backward pass is the last one before the optimizer's step."""
        self.engine.set_gradient_accumulation_boundary(is_boundary)

    def clip(self, clip_val: float) -> None:
        """Clip by norm in the next step."""
        self._clip_val = clip_val

    def step(self) -> None:
        """Apply the gradients."""
        self.engine.step()
        self._has_gradients = False
        self._clip_val = None

    def close(self) -> None:
        """Take the engine away from the module."""
        self.engine.destroy()
