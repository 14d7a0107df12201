"""A profiler that records what torch does, operator by operator and kernel by kernel."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.builtin.checkpoint.place import home_path
from dstrat.errors import RequestError
from dstrat.training.profilers.profiler import Profiler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_log = logging.getLogger(__name__)


class TorchProfiler(Profiler):
    """Records a few batches with ``torch.profiler``: a trace of each rank, and a table of the operators on rank 0.

    A trace is a file for ``chrome://tracing``, https://ui.perfetto.dev or TensorBoard.  Recording slows a run down and
    takes memory, so that only some batches are recorded: ``wait`` batches pass, ``warmup`` ones are recorded and thrown
    away, ``active`` ones are kept, and that ``repeat`` times.

    Args:
        wait: Number of batches to leave alone first.
        warmup: Number of batches to throw away.
        active: Number of batches to record.
        repeat: Number of such cycles, 0 for as many as there are.
        row_limit: Number of operators in the table; 0 prints none.
        dirpath: Folder of the traces; the log folder of the run by default.
        **options: More arguments of ``torch.profiler.profile``, such as ``profile_memory``, ``record_shapes``,
            ``with_stack``, ``with_flops`` and ``activities``.

    Raises:
        RequestError: The numbers of batches make no sense.
    """

    def __init__(
        self,
        *,
        wait: int = 2,
        warmup: int = 1,
        active: int = 5,
        repeat: int = 1,
        row_limit: int = 20,
        dirpath: str | Path | None = None,
        **options: Any,
    ) -> None:
        if active < 1 or min(wait, warmup, repeat, row_limit) < 0:
            raise RequestError(
                f"TorchProfiler(wait={wait!r}, warmup={warmup!r}, active={active!r}, repeat={repeat!r}, "
                f"row_limit={row_limit!r}): active must be 1 or more, the others 0 or more"
            )
        self._wait, self._warmup, self._active, self._repeat = wait, warmup, active, repeat
        self._row_limit, self._dirpath, self._options = row_limit, dirpath, options
        self._stage, self._rank, self._log_dir = "", 0, Path()
        self._profile: torch.profiler.profile | None = None  # of one cycle: torch warns of reusing it
        self._batches = self._in_cycle = self._cycles = 0
        self._reports: list[str] = []

    @override
    def profile(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    @override
    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        self._stage, self._log_dir, self._rank = stage, log_dir, rank
        self._batches = self._cycles = 0
        self._reports = []
        self._start_cycle()

    @override
    def step(self) -> None:
        self._batches += 1
        if self._profile is None:
            return
        self._in_cycle += 1
        self._profile.step()
        if self._in_cycle == self._wait + self._warmup + self._active:
            self._end_cycle()
            if self._cycles != self._repeat:
                self._start_cycle()

    @override
    def finish(self) -> None:
        self._end_cycle()
        if self._rank != 0:
            return
        if self._batches <= self._wait + self._warmup:
            _log.warning(
                "the torch profiler recorded nothing: it starts with batch %d, and %s had %d batches",
                self._wait + self._warmup + 1,
                self._stage,
                self._batches,
            )
        for report in self._reports:
            print(report, file=sys.stderr, flush=True)

    def _start_cycle(self) -> None:
        self._in_cycle = 0
        schedule = torch.profiler.schedule(wait=self._wait, warmup=self._warmup, active=self._active, repeat=1)
        self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._take, **self._options)
        self._profile.start()

    def _end_cycle(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            self._cycles += 1
            profile.stop()

    def _take(self, profile: torch.profiler.profile) -> None:
        """Write the trace of a cycle that is over."""
        if self._in_cycle <= self._wait + self._warmup:
            return  # the run ends with the batch before the first that would be kept
        folder = home_path(self._dirpath or self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._stage}-rank{self._rank}-batch{self._batches}.pt.trace.json"
        profile.export_chrome_trace(str(path))
        self._reports.append(f"{self._table(profile)}trace: {path}")

    def _table(self, profile: torch.profiler.profile) -> str:
        if not self._row_limit or self._rank != 0:
            return ""
        averages = profile.key_averages()
        on_device = any(average.self_device_time_total for average in averages)
        table = averages.table(
            sort_by="self_device_time_total" if on_device else "self_cpu_time_total",
            row_limit=self._row_limit,
            max_name_column_width=32,  # so that the table fits into 120 columns
        )
        return f"{table}\n"
