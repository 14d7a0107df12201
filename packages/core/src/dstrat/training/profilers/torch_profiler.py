"""Profiler of torch's operators and kernels."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.profilers.profiler import Profiler, writable_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

_log = logging.getLogger(__name__)


class TorchProfiler(Profiler):
    """Record a few batches with ``torch.profiler``: a trace of each rank, and a table of the operators on rank 0.

    A trace is a file for ``chrome://tracing``, https://ui.perfetto.dev or TensorBoard.  Recording slows a run down and
    needs memory, so that only some batches are recorded: ``wait`` batches are skipped, ``warmup`` ones recorded and
    discarded, ``active`` ones recorded, and this cycle is repeated ``repeat`` times.

    Args:
        dirpath: Folder of the files; the log folder of the run by default.
        filename: Each rank writes its tables to ``<dirpath>/<stage>-<filename>-rank<rank>.txt``; None prints those of
            rank 0 to stderr.
        group_by_input_shapes: Whether an operator has a line for each shape of its inputs.
        wait: Number of batches to skip.
        warmup: Number of batches to record and discard.
        active: Number of batches to record.
        repeat: Number of cycles; 0 is no limit.
        export_to_chrome: Whether to write traces, unless there is an ``on_trace_ready``, which is called instead.
        row_limit: Number of operators in the table; 0 prints none.
        sort_by_key: Column of the table whose largest values come first, such as ``"cpu_time_total"`` or ``"count"``;
            by default the time of the operator itself, on the device where there is any.
        table_kwargs: More arguments of the table, which torch's ``EventList.table`` takes.
        **options: More arguments of ``torch.profiler.profile``, such as ``profile_memory``, ``record_shapes``,
            ``with_stack``, ``with_flops``, ``activities`` and ``on_trace_ready``.

    Raises:
        RequestError: The numbers of batches make no sense, or torch has no such option or column.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        *,
        wait: int = 2,
        warmup: int = 1,
        active: int = 5,
        repeat: int = 1,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        table_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if active < 1 or min(wait, warmup, repeat, row_limit) < 0:
            raise RequestError(
                f"TorchProfiler(wait={wait!r}, warmup={warmup!r}, active={active!r}, repeat={repeat!r}, "
                f"row_limit={row_limit!r}): active must be 1 or more, the others 0 or more"
            )
        _check_options(sort_by_key, options)
        self._wait, self._warmup, self._active, self._repeat = wait, warmup, active, repeat
        self._dirpath, self._filename, self._options = dirpath, filename, dict(options)
        self._on_trace_ready = self._options.pop("on_trace_ready", None)
        self._options.setdefault("record_shapes", group_by_input_shapes)
        self._groups_by_shapes, self._writes_traces = group_by_input_shapes, export_to_chrome
        self._row_limit, self._sort_by_key, self._table_options = row_limit, sort_by_key, dict(table_kwargs or {})
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
        if self._filename is not None or (self._writes_traces and self._on_trace_ready is None):
            writable_folder(self._dirpath, log_dir)
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
        if self._filename is not None and self._reports:
            path = self._folder() / f"{self._stage}-{self._filename}-rank{self._rank}.txt"
            path.write_text("\n".join(self._reports) + "\n", encoding="utf-8")
            self._reports = [f"profile: {path}"]
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
        self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._report, **self._options)
        self._profile.start()

    def _end_cycle(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            self._cycles += 1
            profile.stop()  # calls _report

    def _report(self, profile: torch.profiler.profile) -> None:
        """Write the trace of a complete cycle, and add its table to the reports."""
        if self._in_cycle <= self._wait + self._warmup:
            return  # torch calls this also for a run that ended before the first recorded batch
        report = self._table(profile)
        if self._on_trace_ready is not None:
            self._on_trace_ready(profile)
        elif self._writes_traces:
            path = self._folder() / f"{self._stage}-rank{self._rank}-batch{self._batches}.pt.trace.json"
            profile.export_chrome_trace(str(path))
            report = f"{report}trace: {path}"
        if report:
            self._reports.append(report)

    def _table(self, profile: torch.profiler.profile) -> str:
        if not self._row_limit or (self._rank != 0 and self._filename is None):
            return ""
        averages = profile.key_averages(group_by_input_shape=self._groups_by_shapes)
        on_device = any(average.self_device_time_total for average in averages)
        options = {
            "sort_by": self._sort_by_key or ("self_device_time_total" if on_device else "self_cpu_time_total"),
            "row_limit": self._row_limit,
            "max_name_column_width": 32,  # so that the table fits into 120 columns
            **self._table_options,
        }
        return f"{averages.table(**options)}\n"

    def _folder(self) -> Path:
        folder = writable_folder(self._dirpath, self._log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _check_options(sort_by_key: str | None, options: Mapping[str, Any]) -> None:
    """Raise a RequestError for an option that torch's profiler lacks, or a column that its table lacks."""
    possible = [name for name in inspect.signature(torch.profiler.profile).parameters if name != "schedule"]
    for name in options:
        if name not in possible:
            when = ": wait, warmup, active and repeat are its schedule" if name == "schedule" else ""
            raise RequestError(f"TorchProfiler has no option {name!r}{when or ', only ' + ', '.join(possible)}")
    column = (sort_by_key or "").replace("cuda", "device")  # torch renamed these columns, and takes both names
    if sort_by_key is not None and not hasattr(torch.autograd.profiler_util.FunctionEventAvg(), column):
        raise RequestError(
            f"TorchProfiler(sort_by_key={sort_by_key!r}) is no column of torch's table: choose one such as "
            "'self_cpu_time_total', 'cpu_time_total', 'self_device_time_total', 'cpu_memory_usage' or 'count'"
        )
