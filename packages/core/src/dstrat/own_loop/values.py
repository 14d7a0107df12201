"""Values of a hand-written loop: collections to reduce or gather, and values for loggers."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors, numbers_to_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.loggers.logger import Logger


def collect(data: Any, device: torch.device, function: Callable[[Tensor], Any]) -> Any:
    """Return a collection with a function applied to each of its tensors and numbers, as tensors on a device."""
    return apply_to_tensors(numbers_to_tensors(data, device), lambda tensor: function(tensor.to(device)))


def as_loggers(value: Any) -> list[Logger]:
    """Return one or several loggers as a list.

    Raises:
        MisuseError: An item is not a logger.
    """
    if value is None:
        return []
    from dstrat.training.arguments import adapt, install_hint
    from dstrat.training.loggers.logger import Logger

    loggers: list[Any] = [adapt(one, Logger) for one in (value if isinstance(value, list | tuple) else [value])]
    for logger in loggers:
        if isinstance(logger, type) or not callable(getattr(logger, "log_metrics", None)):
            hint = install_hint(logger) or ": pass one of dstrat.loggers"
            raise MisuseError(f"loggers has {logger!r}, not a Logger{hint}")
    return loggers


@contextmanager
def open_loggers(loggers: list[Logger], strategy: Strategy) -> Iterator[None]:
    """Open loggers for writing by rank 0, with folders that all ranks share, and close them at the end; collective."""
    if not loggers:
        yield
        return
    from dstrat.training.loggers.defaults import agree_on_folders, call_loggers

    for logger in loggers:
        logger.root_dir = logger.root_dir or Path.cwd()  # a Trainer sets its default_root_dir
    agree_on_folders(loggers, strategy)
    status = "failed"
    try:
        yield
        status = "success"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        call_loggers(loggers, "finalize", status)


def log_metrics(loggers: Iterable[Logger], metrics: Mapping[str, Any], step: int) -> None:
    """Write values to all loggers.

    Raises:
        MisuseError: A value is not a number.
        LoggerError: A logger failed.
    """
    from dstrat.training.loggers.defaults import call_loggers

    call_loggers(list(loggers), "log_metrics", {name: _number(name, value) for name, value in metrics.items()}, step)


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MisuseError(f"log({name!r}, ...) got {value!r}: pass a number, or a tensor of one element") from error
