"""The module that a wrapper such as DistributedDataParallel wraps, so that a training step is its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable

_IGNORED = "_ddp_params_and_buffers_to_ignore"


class StepModule(Module):
    """A module whose forward is a named step of the user's module.

    Wrappers do their work around ``forward``, and a training calls ``training_step``.

    Args:
        module: The user's module; its parameters appear under ``module.``.

    Attributes:
        is_running: Whether a step is being run now.
        after_step: Called after each step, before the wrapper looks at its output.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.is_running = False
        self.after_step: Callable[[], None] | None = None
        if hasattr(module, _IGNORED):
            setattr(self, _IGNORED, [f"module.{name}" for name in getattr(module, _IGNORED)])

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step of that name."""
        self.is_running = True
        try:
            output = getattr(self.module, step)(*args, **kwargs)
        finally:
            self.is_running = False
        if self.after_step is not None:
            self.after_step()
        return output
