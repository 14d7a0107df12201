"""torchft's classes, on the loopback where all groups are on one machine; written for torchft 0.2."""

from __future__ import annotations

import http.client
import http.server
import logging
import os
import re
import socket
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from urllib.request import ProxyHandler, build_opener

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "GlooGroup",
    "LighthouseServer",
    "Manager",
    "NCCLGroup",
    "StateTransport",
    "TrainingEnd",
    "UnequalGroupsError",
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
    from torchft.coordination import LighthouseClient, LighthouseServer, ManagerServer
    from torchft.process_group import create_store_client


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


class UnequalGroupsError(RuntimeError):
    """Replica groups that have different numbers of ranks."""


class _NamedQuorum:
    """Mixin of a process group between replica groups, which remembers the address of its quorum.

    It compares the sizes of the groups first.

    Attributes:
        quorum: Address in the store of a group of the quorum, with the quorum's number; groups of a quorum have the
            same in ranks of the same number.
    """

    quorum = ""
    _timeout: timedelta  # of torchft's class beside this one

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        self.quorum = store_addr
        if group_rank == 0:  # which every group has; other ranks would wait for peers that do not exist
            store = create_store_client(f"{store_addr}/sizes", self._timeout)
            store.set(str(rank), str(group_world_size))
            sizes = [int(store.get(str(each))) for each in range(world_size)]
            if len({*sizes}) > 1:
                raise UnequalGroupsError(
                    f"the replica groups have {' and '.join(map(str, sorted({*sizes})))} ranks, and each rank averages "
                    "with those of the same number: start all with as many devices"
                )
        super().configure(  # type: ignore[misc]  # of torchft's class beside this one
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )


class GlooGroup(_NamedQuorum, ProcessGroupGloo):  # type: ignore[misc]  # torchft has no types that mypy sees
    """Process group between replica groups, on the CPU."""


class NCCLGroup(_NamedQuorum, ProcessGroupNCCL):  # type: ignore[misc]  # torchft has no types that mypy sees
    """Process group between replica groups, on GPUs."""


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


_MARK = re.compile(r"ended-([0-9a-f]+)-(\d+)-(\d+): seen ([-+.\de]+)s ago")
_MARK_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingEnd:
    """Mark at the lighthouse that a group has completed the training.

    The lighthouse outlives the groups, but keeps no data for them.  It never forgets the name of who has sent a
    heartbeat, so the mark is such a name; it lists these on its page.

    Attributes:
        digest: Of the history of the final state.
        step: Number of steps of the final state.
        group: Number of the group.
    """

    digest: str
    step: int
    group: int

    def record(self, lighthouse: str) -> None:
        """Send the mark.

        Raises:
            RuntimeError: The lighthouse does not answer; or TimeoutError.
        """
        client = LighthouseClient(lighthouse, connect_timeout=_MARK_TIMEOUT)
        client.heartbeat(f"ended-{self.digest}-{self.step}-{self.group}", timeout=_MARK_TIMEOUT)

    @classmethod
    def find_newest(cls, lighthouse: str) -> TrainingEnd | None:
        """Return the newest mark; None if the lighthouse has none, or does not answer."""
        try:
            # The lighthouse is in the cluster, not behind the proxy that the environment may name.
            opener = build_opener(ProxyHandler({}))
            with opener.open(f"{lighthouse.rstrip('/')}/status", timeout=_MARK_TIMEOUT.total_seconds()) as page:
                marks = _MARK.findall(page.read().decode())
        except (OSError, http.client.HTTPException):
            return None
        newest = min(marks, key=lambda mark: float(mark[3]), default=None)
        return newest and cls(digest=newest[0], step=int(newest[1]), group=int(newest[2]))


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
