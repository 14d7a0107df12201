"""Two hosts on this machine: network namespaces with names and addresses of their own, and a link between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTALL = "apt-get install iproute2"


def missing_program() -> str | None:
    """Return why there can be no namespaces here; None if there can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return f"ip is not installed: {INSTALL}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"dstrat-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode != 0:
        return "this machine does not let us make network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


class Hosts:
    """Hosts ``alpha`` and ``beta``, whose names do not resolve; a context.

    Attributes:
        addresses: Their addresses, which reach each other and nothing else.
    """

    addresses = ("10.213.7.1", "10.213.7.2")
    names = ("alpha", "beta")

    def __init__(self) -> None:
        self._namespaces = tuple(f"dstrat-{name}-{os.getpid()}" for name in self.names)
        self._interfaces = tuple(f"ds{number}-{os.getpid()}" for number in range(2))

    def __enter__(self) -> Self:
        for namespace in self._namespaces:
            _ip("netns", "add", namespace)
        (first, second), (here, there) = self._namespaces, self._interfaces
        _ip("link", "add", here, "netns", first, "type", "veth", "peer", "name", there, "netns", second)
        for namespace, interface, address in zip(self._namespaces, self._interfaces, self.addresses, strict=True):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", interface)
            _ip("-n", namespace, "link", "set", interface, "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces:
            _ip("netns", "delete", namespace)

    def start(self, number: int, command: Sequence[str], **environ: str) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own."""
        set_name = f'hostname {self.names[number]} && exec "$@"'
        inside = ["ip", "netns", "exec", self._namespaces[number], "unshare", "--uts", "sh", "-c", set_name, "sh"]
        return subprocess.Popen(
            [*inside, *command],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def cut(self) -> None:
        """Cut the link, as if the second host had disappeared."""
        _ip("-n", self._namespaces[1], "link", "set", self._interfaces[1], "down")

    def mend(self) -> None:
        """Connect the hosts again."""
        _ip("-n", self._namespaces[1], "link", "set", self._interfaces[1], "up")

    def slow_down(self, rate: str) -> None:
        """Limit the link to a rate, such as ``"1mbit"``."""
        for namespace, interface in zip(self._namespaces, self._interfaces, strict=True):
            limit = ("tbf", "rate", rate, "burst", "4kb", "latency", "2s")
            subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
