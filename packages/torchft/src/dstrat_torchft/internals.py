"""torchft's classes, on the loopback where all groups are on one machine; written for torchft 0.2."""

from __future__ import annotations

import http.server
import logging
import os
import socket
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

__all__ = [
    "LighthouseServer",
    "Manager",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "StateTransport",
    "servers_on",
    "silence_known_warnings",
]

_LOG_LEVEL = "RUST_LOG"  # read once, when torchft's extension is imported


@contextmanager
def _only_warnings() -> Iterator[None]:
    """Set the log level of extensions in Rust, unless the user has; by default torchft prints ten lines in a step."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "warn"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


with _only_warnings():
    from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL
    from torchft.checkpointing import HTTPTransport
    from torchft.coordination import LighthouseServer, ManagerServer


@contextmanager
def servers_on(address: str | None) -> Iterator[None]:
    """Bind the server of each Manager in a ``with`` block to an address of this machine.

    torchft has no option for it, and binds to every address, which is right for several machines.

    Args:
        address: An IPv4 address; None for torchft's own.
    """
    if address is None:
        yield
        return

    def bound(*args: Any, bind: str, **options: Any) -> Any:
        return ManagerServer(*args, bind=f"{address}:{bind.rpartition(':')[2]}", **options)

    with patch("torchft.manager.ManagerServer", bound):
        yield


class StateTransport(HTTPTransport[Any]):  # type: ignore[misc]  # torchft has no types that mypy sees
    """Server from which a group that joins gets the state; it reports no request, and names the address of our choice.

    Args:
        timeout: Longest wait for the state.
        hostname: Name under which other machines reach this one.
        address: IPv4 address to bind to; None for every address.
    """

    def __init__(self, *, timeout: timedelta, hostname: str, address: str | None) -> None:
        self._hostname = hostname

        class Server(http.server.ThreadingHTTPServer):
            address_family = socket.AF_INET6 if address is None else socket.AF_INET

            def __init__(self, _: Any, handler: Any) -> None:
                handler.log_message = _log_nothing
                super().__init__((address or "", 0), handler)

        # torchft's class listens on every address, and logs each request on stderr.
        with patch("torchft.checkpointing.http_transport._IPv6HTTPServer", Server):
            super().__init__(timeout=timeout, num_chunks=0)

    def address(self) -> str:
        """Return the URL of the state, to which torchft adds the step."""
        return f"http://{self._hostname}:{self._server.socket.getsockname()[1]}/checkpoint/"


def _log_nothing(*_: Any) -> None:
    """Leave out the line on a request, which has no timestamp of a logger, and no name."""


def silence_known_warnings() -> None:
    """Leave out what torchft reports of each state that is sent, and on the CPU of each new quorum.

    Of a lost peer it keeps the line, without the stack of torchft's own thread.
    """
    warnings.filterwarnings(
        "ignore", "The given buffer is not writable", UserWarning, r"torch\.distributed\._serialization"
    )
    logger = logging.getLogger("torchft.manager")
    if _is_relevant not in logger.filters:
        logger.addFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    if "got exception" in record.getMessage():
        record.exc_info = record.exc_text = None
    return "Unable to reset NCCL flight recorder" not in record.getMessage()
