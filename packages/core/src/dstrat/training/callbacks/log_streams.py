"""Logging handlers that hold a stream which is replaced for some time."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO


def move_handlers(old: TextIO, new: TextIO) -> None:
    """Let every logging handler that writes to the old stream write to the new one."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    for logger in loggers:
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                # A stream that cannot be set is one that is looked up with each record, as logging.lastResort's: it
                # follows sys.stderr by itself.
                with suppress(AttributeError):
                    handler.setStream(new)
