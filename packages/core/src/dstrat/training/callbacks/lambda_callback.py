"""Callback made of functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.plugins.settings import nearest
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown"))


class LambdaCallback(Callback):
    """Call functions in the hooks of their names.

    For example ``LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.callback_metrics))``.  A
    strategy that starts processes with spawn or forkserver needs functions of a module instead of lambdas.

    Args:
        **hooks: Functions by names of hooks of :class:`~dstrat.training.callbacks.callback.Callback`, with the hooks'
            arguments.

    Raises:
        RequestError: A hook does not exist, or a value is not a function.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                near = nearest(name, HOOKS)
                hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(HOOKS)}"
                raise RequestError(f"LambdaCallback has no hook {name!r}: {hint}")
            if function is not None:
                if not callable(function):
                    raise RequestError(f"{name}={function!r} of LambdaCallback is not a function")
                setattr(self, name, function)
