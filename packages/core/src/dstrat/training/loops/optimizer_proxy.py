"""An optimizer whose ``step`` goes through the strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.strategy import Strategy


class OptimizerProxy:
    """An optimizer as a module gets it: its ``step`` is the strategy's, everything else is its own.

    Precisions that scale losses, and strategies that average or shard, do their part in the step.

    Args:
        optimizer: One that ``configure_optimizers`` returned.
        strategy: Steps it.
        module: The module whose parameters it has.

    Attributes:
        optimizer: The optimizer itself.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, module: Module) -> None:
        self.optimizer = optimizer
        self._strategy, self._module = strategy, module

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimizer.

        Args:
            closure: Computes the loss and its gradients and returns the loss.
            **kwargs: Passed to the optimizer's ``step``.

        Returns:
            What the closure returned.
        """
        return self._strategy.optimizer_step(self.optimizer, closure or _nothing, self._module, **kwargs)

    @property  # type: ignore[misc]  # so that isinstance holds, which torch's schedulers ask for
    def __class__(self) -> type:
        return type(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _nothing() -> None:
    """Compute nothing: the gradients are there."""
