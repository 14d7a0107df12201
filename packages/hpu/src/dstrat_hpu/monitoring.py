"""Profiler and statistics of Gaudi, under the names of lightning-habana."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.training.callbacks.device_stats_monitor import DeviceStatsMonitor
from dstrat.training.profilers.torch_profiler import TorchProfiler

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger(__name__)
_PROFILE = "HABANA_PROFILE"


class HPUProfiler(TorchProfiler):
    """Records some batches with ``torch.profiler``, on the host and on Gaudi.

    It sets ``HABANA_PROFILE=1``, which the vendor's runtime reads when a device is acquired: make the profiler before
    anything runs on the device.  Operations that are measured wait for the device, so that the whole takes longer than
    without; ``SimpleProfiler`` measures that.

    Args:
        dirpath: Folder of the files; the log folder of the run by default.
        filename: Each rank writes its tables to ``<dirpath>/<stage>-<filename>-rank<rank>.txt``; None prints those of
            rank 0.
        group_by_input_shapes: Whether an operator has a line for each shape of its inputs.
        **options: The others of :class:`~dstrat.profilers.TorchProfiler`; ``activities`` are those of host and Gaudi
            unless they are among these.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dirpath, filename, group_by_input_shapes, **options)
        # Now, as `start` comes after the device is acquired; a value of the user's stays, which may be 0.
        os.environ.setdefault(_PROFILE, "1")

    @override
    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        host, gaudi = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.HPU
        # What torch supports depends on libraries that are loaded with the device.
        if gaudi in torch.profiler.supported_activities():
            self._options.setdefault("activities", [host, gaudi])
        elif rank == 0 and "activities" not in self._options:
            _log.warning("torch %s records nothing of Gaudi here, so that the profile is the host's", torch.__version__)
        super().start(stage, log_dir, rank)


class HPUStatsMonitor(DeviceStatsMonitor):  # a class, as the default of cpu_stats differs
    """Writes what Gaudi reports to the loggers: ``device/memory_used``, ``device/graph_compilations`` and others.

    It is :class:`~dstrat.callbacks.DeviceStatsMonitor` under the name that users of Gaudi know, with the host's values
    left out unless they are asked for.

    Args:
        cpu_stats: Whether the host's values are written too.
    """

    def __init__(self, cpu_stats: bool | None = False) -> None:
        super().__init__(cpu_stats)
