"""Creating a module in the precision and on the device of a run."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.interfaces.strategy import Strategy


@contextmanager
def creating_modules(strategy: Strategy, *, is_empty: bool) -> Iterator[None]:
    """In this context new tensors have the strategy's dtype, and its device where the run happens in this process.

    Args:
        strategy: Of the run.
        is_empty: Whether parameters are left without initial values.
    """
    launcher = strategy.launcher
    with ExitStack() as stack:
        stack.enter_context(strategy.tensor_init_context())
        if launcher is None or launcher.runs_here:
            stack.enter_context(strategy.root_device)
        if is_empty:
            stack.enter_context(_NoInitialValues())
        yield


class _NoInitialValues(TorchFunctionMode):
    """Leaves out what ``torch.nn.init`` does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
