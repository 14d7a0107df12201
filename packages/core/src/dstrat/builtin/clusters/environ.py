"""Variables of a cluster environment, and errors with a hint."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGER = re.compile(r"[0-9]{1,18}")
_FIRST_PORT, _NUM_PORTS = 15000, 15000  # below the ports that Linux (32768) and Kubernetes (30000) hand out


@dataclass(frozen=True, kw_only=True, slots=True)
class Variables:
    """The variables of one environment.

    Attributes:
        environ: The variables.
        hint: How to set them, such as ``"start the script with torchrun"``.
    """

    environ: Mapping[str, str]
    hint: str

    def text(self, name: str) -> str:
        """Return a variable that must be set.

        Raises:
            ClusterError: It is missing or empty.
        """
        value = self.environ.get(name, "")
        if not value:
            state = f"is {value!r}" if name in self.environ else "is not set"
            raise ClusterError(f"{name} {state}: {self.hint}")
        return value

    def integer(self, name: str, *, minimum: int = 0) -> int:
        """Return a variable that must be a whole number.

        Raises:
            ClusterError: It is missing, not a whole number, or too small.
        """
        value = self.text(name)
        if not _INTEGER.fullmatch(value) or int(value) < minimum:
            raise ClusterError(f"{name} is {value!r}, and must be a whole number from {minimum} upwards: {self.hint}")
        return int(value)

    def port(self, name: str = "MASTER_PORT") -> int:
        """Return a variable that must be a port.

        Raises:
            ClusterError: It is missing or no port.
        """
        port = self.integer(name, minimum=1)
        if port > 65535:
            raise ClusterError(f"{name} is {port}, and ports end at 65535: set {name} to a free port")
        return port


def port_of_job(job: str, step: str = "0") -> int:
    """Return a port that all processes of a job compute from the names or numbers of job and step.

    Jobs with consecutive numbers often share a machine, and get different ports.
    """
    return _FIRST_PORT + (_number(job) + 7919 * _number(step)) % _NUM_PORTS


def _number(name: str) -> int:
    # Not hash(), which differs between processes.
    return int(name) if _INTEGER.fullmatch(name) else zlib.crc32(name.encode(errors="surrogateescape"))
