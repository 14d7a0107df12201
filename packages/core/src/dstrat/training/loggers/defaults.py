"""The loggers that a Trainer uses: the user's, or the one that it takes when the user names none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.training.loggers.logger import Logger

if TYPE_CHECKING:
    from pathlib import Path


def complete_loggers(
    given: Logger | Iterable[Logger] | bool | None, root_dir: Path, *, writes: bool = True, is_tried: bool = False
) -> list[Logger]:
    """Return the loggers of a Trainer, each with a folder to write in.

    Args:
        given: One, several in any collection, True or None for the CSV logger, False for none.
        root_dir: Where a logger writes that was given no folder.
        writes: Whether this process is the one that writes.
        is_tried: Whether the run is only tried: silent ones then take the place of all of them.

    Raises:
        RequestError: Something given is no logger.
    """
    if given is None or given is True:
        from dstrat.training.loggers.csv_logger import CSVLogger

        given = CSVLogger()
    if given is False:
        return []
    is_one = isinstance(given, str | Logger) or not isinstance(given, Iterable)
    loggers: list[Any] = [given] if is_one else list(given)  # type: ignore[arg-type]  # it is known to be iterable
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise RequestError(
                f"logger={logger!r} is not a Logger, True or False: give an instance, such as CSVLogger()"
            )
    if is_tried:
        from dstrat.training.loggers.silent import SilentLogger

        loggers = [SilentLogger() for _ in loggers]
    for logger in loggers:
        logger.root_dir = logger.root_dir or root_dir
        logger.writes = writes
    return loggers
