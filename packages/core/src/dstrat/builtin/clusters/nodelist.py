"""Reading SLURM's short form of a list of hosts, as in ``"n[01-03,7],gpu5"``."""

from __future__ import annotations

import re

from dstrat.errors import ClusterError

_FIRST_HOST = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+(?=,|\Z)")
_BRACKETS = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


def first_host(nodelist: str) -> str:
    """Return the first host of a list.

    Raises:
        ClusterError: It is not such a list.
    """
    first = _FIRST_HOST.match(nodelist)
    host = _BRACKETS.sub(r"\1", first.group()) if first else ""
    if not host or "[" in host:
        raise ClusterError(
            f"SLURM's list of nodes is {nodelist!r}, which does not begin with a host: "
            "set MASTER_ADDR to the machine of rank 0"
        )
    return host
