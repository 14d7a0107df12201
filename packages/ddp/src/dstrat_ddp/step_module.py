"""The module that a wrapper such as DistributedDataParallel wraps, so that a training step is its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from dstrat.parallel.separate_modules import SeparateModules

if TYPE_CHECKING:
    from collections.abc import Callable

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute in which DistributedDataParallel finds the names of what it does not synchronize in a module."""


def ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DistributedDataParallel does not synchronize."""
    if isinstance(module, SeparateModules):  # each of them has a wrapper
        return frozenset(f"{child}.{name}" for child, one in module.named_children() for name in ignored_names(one))
    return frozenset(getattr(module, _IGNORED, ()))


def pass_ignored_names(module: Module, outer: Module) -> None:
    """Let a wrapper of a module ignore what the user has excluded from synchronization there.

    Args:
        module: The user's.
        outer: The module that is wrapped instead, which has the user's as ``module``.
    """
    if names := ignored_names(module):
        setattr(outer, _IGNORED, [f"module.{name}" for name in names])


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
        pass_ignored_names(module, self)

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
