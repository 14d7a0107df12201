"""Contexts of a run: settings of torch, creation of the module, first meeting of the ranks."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.trainer import Trainer


_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"  # without it cuBLAS has no deterministic algorithm: torch's note on reproducibility


@contextmanager
def numerics(*, deterministic: bool | Literal["warn"] | None, benchmark: bool | None) -> Iterator[None]:
    """In this context operations are deterministic, and cuDNN searches for its fastest algorithms, as asked.

    Args:
        deterministic: Whether an operation without a deterministic implementation is an error, or warns; None leaves
            torch's setting.
        benchmark: Whether cuDNN searches; None leaves torch's setting.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    had_benchmark = torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault(_CUBLAS, ":4096:8")
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.backends.cudnn.benchmark = had_benchmark


# Initialization of a module in the precision and on the device of a run


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


# Warning of a long wait for other processes


_log = logging.getLogger(__name__)

SECONDS_UNTOLD = 10.0
"""How long a process waits before it says so."""


@contextmanager
def warn_if_slow(trainer: Trainer, call: str) -> Iterator[None]:
    """Log, when a ``with`` block takes long in which this process waits for all others, that it does.

    Args:
        trainer: Says how many processes there are.
        call: Every process has to call.
    """
    if trainer.world_size == 1:
        yield
        return
    line = (
        f"rank {trainer.global_rank} has waited {SECONDS_UNTOLD:g} s in {call} for the others: every process calls it, "
        "also where only one writes; take it out of `if trainer.is_global_zero:` and the like"
    )
    timer = threading.Timer(SECONDS_UNTOLD, _log.warning, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
