"""Profiler of the total time of each action."""

from __future__ import annotations

import sys
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from typing_extensions import Self, override

from dstrat.training.profilers.profiler import Profiler, writable_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

R = TypeVar("R")


class SimpleProfiler(Profiler):
    """Count the calls of each action, and add up their wall-clock time.

    Asynchronous work of a device counts for the action that waits for it; to see kernels use
    :class:`~dstrat.training.profilers.torch_profiler.TorchProfiler`.

    Args:
        dirpath: Folder of the files; the log folder of the run by default.
        filename: Each rank writes its table to ``<dirpath>/<stage>-<filename>-rank<rank>.txt``; None writes no files.
        extended: Whether the table has the numbers of calls and the shares too, not only the times.
        prints: Whether rank 0 prints its table to stderr.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        **Profiler.retired_members,
        "recorded_durations": "totals() has the seconds of each action",
    }

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        extended: bool = True,
        *,
        prints: bool = True,
    ) -> None:
        self._dirpath, self._filename, self._extended, self._prints = dirpath, filename, extended, prints
        self._stage = ""
        self._folder = Path()
        self._rank = 0
        self._started: float | None = None
        self._records: dict[str, _Record] = {}
        self._open: list[float] = []  # for each running action, outermost first: seconds of its nested actions

    @override
    def profile(self, name: str) -> _Measured:
        return _Measured(self, name)

    @override
    def timed(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        # Not by way of profile, whose context would cost as much as a short action.
        record, stack = self._record(name), self._open

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> R:
            stack.append(0.0)
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                record.add(perf_counter() - start, stack)

        return timed_function

    @override
    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        self._stage, self._rank = stage, rank
        if self._filename is not None:
            self._folder = writable_folder(self._dirpath, log_dir)
        for record in self._records.values():  # in place, as wrapped functions hold the records and the list
            record.reset()
        self._open.clear()
        self._started = perf_counter()

    @override
    def finish(self) -> None:
        if self._started is None:
            return
        seconds, self._started = perf_counter() - self._started, None
        if self._prints and self._rank == 0:
            print(self.table(seconds), file=sys.stderr, flush=True)
        if self._filename is not None:
            path = self._folder / f"{self._stage}-{self._filename}-rank{self._rank}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.table(seconds) + "\n", encoding="utf-8")

    @override
    def totals(self) -> dict[str, float]:
        return {name: record.self_seconds for name, record in self._records.items() if record.calls}

    def table(self, seconds: float) -> str:
        """Return a table with a line for each action, the longest first.

        The last column of an extended table is the action's share of the total without its nested actions, so that the
        column adds up to 100 %.

        Args:
            seconds: Total duration.
        """
        called = {name: record for name, record in self._records.items() if record.calls}
        rows: list[tuple[str, ...]] = [("action", "calls", "mean ms", "total s", "own %")]
        rows += [
            (
                name,
                f"{record.calls:,}",
                f"{1e3 * record.seconds / record.calls:.3f}",
                f"{record.seconds:.3f}",
                f"{100 * record.self_seconds / seconds:.1f}",
            )
            for name, record in sorted(called.items(), key=lambda item: -item[1].seconds)
        ]
        remaining = max(0.0, seconds - sum(record.self_seconds for record in called.values()))
        rows.append(("(everything else)", "", "", f"{remaining:.3f}", f"{100 * remaining / seconds:.1f}"))
        if not self._extended:
            rows = [(row[0], row[2], row[3]) for row in rows]
        return _aligned(f"Profile of {self._stage} on rank {self._rank}: {seconds:.3f} s", rows)

    def _record(self, name: str) -> _Record:
        return self._records.setdefault(name, _Record())


class _Record:
    """Calls and times of one action."""

    __slots__ = ("calls", "seconds", "self_seconds")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self.calls, self.seconds, self.self_seconds = 0, 0.0, 0.0

    def add(self, seconds: float, stack: list[float]) -> None:
        """Count a call at its end, when it is the innermost running one."""
        self.calls += 1
        self.seconds += seconds
        self.self_seconds += seconds - stack.pop()
        if stack:
            stack[-1] += seconds


class _Measured:
    """The context of one action; entered once."""

    __slots__ = ("_name", "_profiler", "_start")

    def __init__(self, profiler: SimpleProfiler, name: str) -> None:
        self._profiler, self._name = profiler, name

    def __enter__(self) -> Self:
        self._profiler._open.append(0.0)  # noqa: SLF001 - a part of the profiler
        self._start = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seconds = perf_counter() - self._start
        self._profiler._record(self._name).add(seconds, self._profiler._open)  # noqa: SLF001 - a part of the profiler


def _aligned(title: str, rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return "\n".join([title, lines[0], rule, *lines[1:]])
