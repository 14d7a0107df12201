"""The cluster environment of ranks that the kit has started on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.interfaces.cluster import ClusterEnvironment

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping


class LoopbackCluster(ClusterEnvironment):
    """Ranks on this machine that exist already and meet on a socket that is bound to the loopback.

    Args:
        rank: Which rank this is.
        world_size: How many there are.
        port: Where rank 0 listens.
        listener: The socket that it listens on, in rank 0.
    """

    def __init__(self, rank: int, world_size: int, port: int, listener: socket.socket | None) -> None:
        super().__init__({})
        self._rank, self._world_size, self._port, self._listener = rank, world_size, port, listener

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:  # noqa: ARG003 - it is never found, but given
        return None

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._port

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def global_rank(self) -> int:
        return self._rank

    @property
    def local_rank(self) -> int:
        return self._rank

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def listening_socket(self) -> int | None:
        return None if self._listener is None else self._listener.fileno()
