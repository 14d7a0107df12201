"""Calling several loggers: the errors of one carry its name, and processes agree on the folders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import LoggerError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.loggers.logger import Logger


def call_loggers(loggers: Sequence[Logger], method: str, *args: Any) -> None:
    """Call a method of every logger that writes in this process, also after one that fails.

    Raises:
        LoggerError: One failed; what it raised is the cause.
    """
    failed: list[tuple[Logger, Exception]] = []
    for logger in loggers:
        if logger.writes:
            try:
                getattr(logger, method)(*args)
            except Exception as error:  # noqa: BLE001 - it is raised below, with the logger's name
                failed.append((logger, error))
    if failed:
        messages = [f"{type(logger).__name__}.{method} failed: {cause!r}" for logger, cause in failed]
        raise LoggerError("; ".join(messages)) from failed[0][1]


def agree_on_folders(loggers: Sequence[Logger], strategy: Strategy) -> Path | None:
    """Let global rank 0 alone write, and tell the other processes where; collective.

    Returns:
        The folder of the first logger that has one.
    """
    for logger in loggers:
        logger.writes = strategy.is_global_zero
    folders: list[Path | None] = strategy.broadcast([logger.log_dir for logger in loggers])
    for logger, folder in zip(loggers, folders, strict=True):
        if not logger.writes:
            logger.join(folder)
    return next((folder for folder in folders if folder is not None), None)
