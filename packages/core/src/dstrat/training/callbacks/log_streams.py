"""Logging handlers that hold a stream which is replaced for some time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO


def move_handlers(old: TextIO, new: TextIO) -> None:
    """Let every logging handler that writes to the old stream write to the new one."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)
