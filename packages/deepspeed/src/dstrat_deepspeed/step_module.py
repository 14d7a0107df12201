"""The module that DeepSpeed wraps, so that a step of the user's module is its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class StepModule(Module):
    """A module whose forward runs a step of the user's module, and whose parts are those of the user's module.

    DeepSpeed does its work around ``forward``, and a training calls ``training_step``.  Parameters have the names that
    they have in the user's module, also in checkpoints of DeepSpeed's own.

    Args:
        module: The user's module.
        context: Returns the context that each step runs in.
    """

    def __init__(self, module: Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.__dict__.update(_user_module=module, _step_context=context)
        for parts in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[parts] = getattr(module, parts)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return bool(self.__dict__["_user_module"].training) if "_user_module" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        """Leave the mode as it is, which is set on the user's module."""

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, which is a method of the user's module."""
        with self.__dict__["_step_context"]():
            return step(*args, **kwargs)
