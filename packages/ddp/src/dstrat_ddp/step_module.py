"""The module that a wrapper such as DistributedDataParallel wraps, so that a training step is its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute by which a module names what DistributedDataParallel leaves alone."""


class StepWatch:
    """What is known of the step of a StepModule; apart from the module, because setting a module's attributes is slow.

    Attributes:
        is_running: Whether a step is being run now.
        after_step: Called after each step, before the wrapper looks at its output.
    """

    __slots__ = ("after_step", "is_running")

    def __init__(self) -> None:
        self.is_running = False
        self.after_step: Callable[[], None] | None = None


class StepModule(Module):
    """A module whose forward is a named step of the user's module.

    Wrappers do their work around ``forward``, and a training calls ``training_step``.

    Args:
        module: The user's module; its parameters appear under ``module.``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.watch = StepWatch()
        if hasattr(module, IGNORED):
            setattr(self, IGNORED, [f"module.{name}" for name in getattr(module, IGNORED)])

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step of that name."""
        watch = self.watch
        watch.is_running = True
        try:
            output = getattr(self.module, step)(*args, **kwargs)
        finally:
            watch.is_running = False
        if watch.after_step is not None:
            watch.after_step()
        return output
