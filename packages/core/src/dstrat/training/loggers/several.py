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
        messages = [_describe(logger, method, cause) for logger, cause in failed]
        raise LoggerError("; ".join(messages)) from failed[0][1]


def _describe(logger: Logger, name: str, cause: Exception) -> str:
    # Its own errors are sentences, which a repr would only quote.
    return f"{type(logger).__name__}.{name} failed: {cause if isinstance(cause, LoggerError) else repr(cause)}"


def agree_on_folders(loggers: Sequence[Logger], strategy: Strategy) -> Path | None:
    """Let global rank 0 alone write, and broadcast where; collective.

    Returns:
        The folder of the first logger that has one.

    Raises:
        LoggerError: A logger cannot make its folder.
    """
    for logger in loggers:
        logger.writes = strategy.is_global_zero
    folders: list[Path | None] = strategy.broadcast([_folder_of(logger) for logger in loggers])
    for logger, folder in zip(loggers, folders, strict=True):
        if not logger.writes:
            logger.join(folder)
    return next((folder for folder in folders if folder is not None), None)


def _folder_of(logger: Logger) -> Path | None:
    try:
        return logger.log_dir
    except Exception as error:
        raise LoggerError(_describe(logger, "log_dir", error)) from error
