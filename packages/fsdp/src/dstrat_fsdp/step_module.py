"""The module that is sharded last, so that a step is the forward before which parameters are gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

if TYPE_CHECKING:
    from collections.abc import Callable


class StepModule(Module):
    """A module whose forward runs a step of the user's module.

    What is left of the user's module outside of its blocks is gathered around ``forward``, and a training calls
    ``training_step``.

    Args:
        module: The user's module; its parameters appear under ``module.``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self._gathers = module if isinstance(module, FSDPModule) else None

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, which is a method of the user's module."""
        if self._gathers is not None:  # it has sharded itself, around its forward and not around its steps
            self._gathers.unshard()
        return step(*args, **kwargs)
