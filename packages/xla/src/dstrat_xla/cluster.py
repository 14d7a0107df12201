"""Cluster environment of TPU pods: several hosts, with the script started once on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import Variables
from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOSTS, _HOST = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
_HINT = f"on each host of the pod set {_HOSTS} to the names of all, separated by commas, and {_HOST} to its number"
_PORT = 29500  # the same on each host, which cannot agree on a free one before they are connected


class XLAEnvironment(LocalEnvironment):
    """Hosts of a TPU pod, where dstrat starts the ranks of each host.

    Google Kubernetes Engine sets the variables on each host.  Elsewhere set them, or use ``MASTER_ADDR``,
    ``MASTER_PORT`` and ``NODE_RANK`` as on other machines.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        super().__init__(environ)
        self._pod = Variables(environ=self.environ, hint=_HINT)

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        hosts = environ.get(_HOSTS, "").split(",")
        return f"{_HOSTS} has {len(hosts)} hosts" if len(hosts) > 1 else None

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in the order of their ranks."""
        return [host.strip() for host in self._pod.text(_HOSTS).split(",")]

    @property
    def main_address(self) -> str:
        return super().main_address if self.is_rank else self.environ.get("MASTER_ADDR") or self.hosts[0]

    @property
    def main_port(self) -> int:
        """Port on which global rank 0 listens for the others; ``MASTER_PORT`` chooses another one."""
        if self.is_rank:
            return super().main_port
        return self._pod.port() if "MASTER_PORT" in self.environ else _PORT

    @property
    def node_rank(self) -> int:
        return super().node_rank if self.is_rank else self._pod.integer(_HOST)

    def validate(self, *, num_devices: int, num_nodes: int) -> None:
        if self.is_rank:
            super().validate(num_devices=num_devices, num_nodes=num_nodes)
            return
        if num_nodes != len(self.hosts):
            raise ClusterError(
                f"{_HOSTS} has {len(self.hosts)} hosts, and num_nodes is {num_nodes}: pass num_nodes={len(self.hosts)}"
            )
        if self.node_rank >= num_nodes:
            raise ClusterError(f"{_HOST} is {self.node_rank}, and the hosts are 0 to {num_nodes - 1}: {_HINT}")
