"""Statistics of devices and host for the loggers."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.training.callbacks.callback import Callback
from dstrat.training.loggers.defaults import call_loggers

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


_log = logging.getLogger(__name__)


class DeviceStatsMonitor(Callback):
    """Write statistics of rank 0's device and host to the loggers.

    Names are ``device/<name>`` for the values of
    :meth:`~dstrat.interfaces.accelerator.Accelerator.get_device_stats`, which on CUDA are bytes of memory, and
    ``host/process_memory``, ``host/available_memory`` (bytes), ``host/process_cpu_percent`` (100 for one busy core) and
    ``host/load_1min``.  They are written with other step values (``log_every_n_steps``).

    Args:
        cpu_stats: Whether to write the host's values; None writes them if the accelerator has no statistics.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._host: HostStats | None = None
        self._due_at_step: float = math.inf

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero and not (trainer.loggers and trainer.log_every_n_steps):
            _log.warning("DeviceStatsMonitor writes nothing, as the Trainer has no logger that writes in steps")
        if not trainer.writing_loggers or not trainer.log_every_n_steps:  # on ranks other than 0 no logger writes
            return
        wants_host = not _device_stats(trainer) if self._cpu_stats is None else self._cpu_stats
        self._host = HostStats() if wants_host else None
        self._set_due(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step >= self._due_at_step:
            self._set_due(trainer)
            self._write(trainer)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._host = None
        self._due_at_step = math.inf

    def _set_due(self, trainer: Trainer) -> None:
        every = trainer.log_every_n_steps
        self._due_at_step = (trainer.global_step // every + 1) * every

    def _write(self, trainer: Trainer) -> None:
        values = {f"device/{name}": value for name, value in _device_stats(trainer).items()}
        if self._host is not None:
            values |= {f"host/{name}": value for name, value in self._host.take().items()}
        if values:
            call_loggers(
                trainer.loggers, "log_metrics", {"epoch": trainer.current_epoch, **values}, trainer.global_step
            )


def _device_stats(trainer: Trainer) -> dict[str, float]:
    return trainer.strategy.accelerator.get_device_stats(trainer.strategy.root_device)


# Memory and processor statistics of this process


_PROC = Path("/proc")


class HostStats:
    """Statistics of this process and its machine, from ``/proc`` on Linux and from psutil elsewhere."""

    def __init__(self) -> None:
        self._before = (time.monotonic(), time.process_time())

    def take(self) -> dict[str, float]:
        """Return the values by name.

        ``process_memory`` and ``available_memory`` are in bytes; ``process_cpu_percent`` is the mean since the last
        call, 100 for one busy core; ``load_1min`` is the number of running or waiting processes.
        """
        now = (time.monotonic(), time.process_time())
        (wall_before, cpu_before), self._before = self._before, now
        # A clock of low resolution may not have advanced.
        values = {"process_cpu_percent": 100 * (now[1] - cpu_before) / max(now[0] - wall_before, 1e-9)}
        if hasattr(os, "getloadavg"):  # not on Windows
            values["load_1min"] = os.getloadavg()[0]
        return values | _memory()


def _memory() -> dict[str, float]:
    if (_PROC / "self/statm").exists():
        resident_pages = int((_PROC / "self/statm").read_text().split()[1])
        available = next(line for line in (_PROC / "meminfo").read_text().splitlines() if "MemAvailable" in line)
        return {  # /proc counts pages and KiB
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


@cache  # one warning
def _psutil() -> Any | None:
    try:
        import psutil  # type: ignore[import-untyped,import-not-found,unused-ignore]  # it is optional
    except ImportError:
        _log.warning("the memory of a process cannot be read on %s without psutil: pip install psutil", sys.platform)
        return None
    return psutil
