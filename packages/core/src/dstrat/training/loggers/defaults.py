"""The logger that a Trainer uses when the user names none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.training.loggers.logger import Logger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def complete_loggers(
    given: Logger | Sequence[Logger] | bool | None, root_dir: Path, *, writes: bool = True
) -> list[Logger]:
    """Return the loggers of a Trainer, each with a folder to write in.

    Args:
        given: One, several, True or None for the CSV logger, False for none.
        root_dir: Where a logger writes that was given no folder.
        writes: Whether this process is the one that writes.

    Raises:
        RequestError: Something given is no logger.
    """
    if given is None or given is True:
        from dstrat.training.loggers.csv_logger import CSVLogger

        given = CSVLogger()
    if given is False:
        return []
    loggers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise RequestError(
                f"logger={logger!r} is not a Logger, True or False: give an instance, such as CSVLogger()"
            )
        logger.root_dir = logger.root_dir or root_dir
        logger.writes = writes
    return loggers
