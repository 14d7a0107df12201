"""Memory and processor statistics of this process."""

from __future__ import annotations

import logging
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)
_PROC = Path("/proc")


class HostStats:
    """Measures this process and its machine, through ``/proc`` on Linux and through psutil elsewhere."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), time.process_time())

    def take(self) -> dict[str, float]:
        """Return values by name.

        ``process_memory`` and ``available_memory`` are bytes, ``process_cpu_percent`` is 100 for one busy core since
        the last call, ``load_1min`` is the number of processes that ran or waited.
        """
        now = (time.monotonic(), time.process_time())
        (wall_before, cpu_before), self._before = self._before, now
        values = {"process_cpu_percent": 100 * (now[1] - cpu_before) / max(now[0] - wall_before, 1e-9)}
        if hasattr(os, "getloadavg"):  # not on Windows
            values["load_1min"] = os.getloadavg()[0]
        return values | _memory()


def _memory() -> dict[str, float]:
    if (_PROC / "self/statm").exists():
        resident_pages = int((_PROC / "self/statm").read_text().split()[1])
        available = next(line for line in (_PROC / "meminfo").read_text().splitlines() if "MemAvailable" in line)
        return {
            "process_memory": float(resident_pages * os.sysconf("SC_PAGE_SIZE")),
            "available_memory": float(available.split()[1]) * 1024,
        }
    psutil = _psutil()
    if psutil is None:
        return {}
    return {
        "process_memory": float(psutil.Process().memory_info().rss),
        "available_memory": float(psutil.virtual_memory().available),
    }


@cache
def _psutil() -> Any | None:
    try:
        import psutil  # type: ignore[import-untyped,import-not-found,unused-ignore]  # it is optional
    except ImportError:
        _log.warning("the memory of a process cannot be read on %s without psutil: pip install psutil", sys.platform)
        return None
    return psutil
