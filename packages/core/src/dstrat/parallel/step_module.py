"""A module whose forward is a step, for wrappers that do their work around ``forward``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable


class StepModule(Module):
    """A module whose forward runs a step of the user's module.

    Wrappers such as DistributedDataParallel act around ``forward``, and a training calls ``training_step``.
    A strategy wraps ``StepModule(self.module)``, and calls the wrapper with the step.

    Args:
        module: The user's module; its parameters appear under ``module.``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step: a method of the user's module, or a function that calls it."""
        return step(*args, **kwargs)
