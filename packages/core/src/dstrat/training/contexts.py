"""Contexts of a run: settings of torch, creation of modules, warnings of slow barriers."""

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
    from dstrat.training.run import Run


# Without it cuBLAS has no deterministic algorithm, and torch raises: see torch's page on reproducibility.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def numerics(*, deterministic: bool | Literal["warn"] | None, benchmark: bool | None) -> Iterator[None]:
    """Set torch's deterministic algorithms and cuDNN's benchmark mode in a ``with`` block.

    Args:
        deterministic: Whether an operation without a deterministic implementation is an error; ``"warn"`` only warns,
            and None leaves torch's setting.
        benchmark: Whether cuDNN searches for its fastest algorithms; None leaves torch's setting.
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
        if deterministic is not None:  # the call imports inductor, and fails where Ctrl-C has broken off that import
            torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.backends.cudnn.benchmark = had_benchmark


# Initialization of a module in the precision and on the device of a run


@contextmanager
def creating_modules(strategy: Strategy, *, is_empty: bool) -> Iterator[None]:
    """Create tensors with the strategy's dtype in a ``with`` block, and on its device if the run is in this process.

    Args:
        strategy: Of the run.
        is_empty: Whether parameters stay uninitialized.
    """
    launcher = strategy.launcher
    with ExitStack() as stack:
        stack.enter_context(strategy.tensor_init_context())
        # Not if the module is sent to other processes: CUDA that is in use here cannot be used after a fork.
        if launcher is None or launcher.runs_here:
            stack.enter_context(strategy.root_device)
        if is_empty:
            stack.enter_context(_SkipInit())
        yield


class _SkipInit(TorchFunctionMode):
    """A context in which the functions of ``torch.nn.init`` return their tensor unchanged."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Layers make their parameters by torch.empty, and fill them by these functions in place.
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


# Warnings of slow barriers


_log = logging.getLogger(__name__)

SECONDS_BEFORE_WARNING = 10.0
"""Seconds of waiting after which a rank logs a warning."""


@contextmanager
def warn_if_slow(run: Run, call: str) -> Iterator[None]:
    """Log a warning if a ``with`` block, in which this rank waits for all others, takes long.

    Args:
        run: Has the rank and the number of processes.
        call: Name of the method that every process must call.
    """
    if run.world_size == 1:
        yield
        return
    line = (
        f"rank {run.strategy.global_rank} has waited {SECONDS_BEFORE_WARNING:g} s in {call} for the others: every "
        "process calls it, also where only one writes; take it out of `if trainer.is_global_zero:` and the like"
    )
    timer = threading.Timer(SECONDS_BEFORE_WARNING, _log.warning, [line])  # this thread is blocked in the collective
    timer.daemon = True  # a process that exits in between does not wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
