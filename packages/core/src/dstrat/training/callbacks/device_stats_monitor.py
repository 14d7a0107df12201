"""Writing what devices report of themselves to the loggers."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.host_stats import HostStats
from dstrat.training.loggers.several import call_loggers

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class DeviceStatsMonitor(Callback):
    """Writes what the accelerator reports of its device, and what the machine says of the process, to the loggers.

    Values are those of rank 0: ``device/<name>`` as :meth:`~dstrat.interfaces.accelerator.Accelerator.get_device_stats`
    gives them, on CUDA bytes of memory, and ``host/process_memory``, ``host/available_memory`` (bytes),
    ``host/process_cpu_percent`` (100 for one busy core) and ``host/load_1min``.  They are written with the other values
    of steps (``log_every_n_steps``).

    Args:
        cpu_stats: Whether the host's values are written; None writes them where the accelerator reports nothing.
    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._host: HostStats | None = None
        self._due_at_step: float = math.inf

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.is_global_zero and not (trainer.loggers and trainer.log_every_n_steps):
            _log.warning("DeviceStatsMonitor writes nothing, as the Trainer has no logger that writes in steps")
        if not trainer.writing_loggers or not trainer.log_every_n_steps:
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
