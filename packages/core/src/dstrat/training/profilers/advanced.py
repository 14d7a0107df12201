"""Profiler of every function call, with cProfile."""

from __future__ import annotations

import cProfile
import io
import pstats
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.profilers.profiler import Profiler, writable_folder

if TYPE_CHECKING:
    from collections.abc import Iterator


class AdvancedProfiler(Profiler):
    """Record the functions that each action calls, with their calls and times, by Python's ``cProfile``.

    It slows a run down considerably, and its tables are long: use
    :class:`~dstrat.training.profilers.simple.SimpleProfiler` first.  Python records for one action at a time, so that
    calls of a nested action count for that one only.

    Args:
        dirpath: Folder of the files; the log folder of the run by default.
        filename: Each rank writes its tables to ``<dirpath>/<stage>-<filename>-rank<rank>.txt``; None prints those of
            rank 0 to stderr.
        line_count_restriction: Number of functions in each table, or a fraction as a float of at most 1.
        dump_stats: Whether each rank also writes ``<stage>-<action>-rank<rank>.prof`` to the folder for every action,
            for ``python -m pstats``, snakeviz and similar tools.

    Raises:
        RequestError: The restriction is not positive, or a float above 1.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        if line_count_restriction <= 0 or (isinstance(line_count_restriction, float) and line_count_restriction > 1):
            raise RequestError(  # pstats would ignore it, and print all functions
                f"AdvancedProfiler(line_count_restriction={line_count_restriction!r}) must be an int above 0, the "
                "number of functions, or a fraction of them as a float up to 1.0"
            )
        self._dirpath, self._filename, self._dumps = dirpath, filename, dump_stats
        self._restriction = line_count_restriction
        self._stage, self._folder, self._rank = "", Path(), 0
        self._profiles: dict[str, cProfile.Profile] | None = None
        self._running: list[cProfile.Profile] = []  # outermost first

    @override
    @contextmanager
    def profile(self, name: str) -> Iterator[None]:
        if self._profiles is None:  # no run is measured
            yield
            return
        inner = self._profiles.setdefault(name, cProfile.Profile())
        if self._running:  # two enabled profiles are an error since Python 3.12
            self._running[-1].disable()
        self._running.append(inner)
        inner.enable()
        try:
            yield
        finally:
            inner.disable()
            self._running.pop()
            if self._running:
                self._running[-1].enable()

    @override
    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        self._stage, self._rank = stage, rank
        if self._filename is not None or self._dumps:
            self._folder = writable_folder(self._dirpath, log_dir)
        self._profiles, self._running = {}, []

    @override
    def finish(self) -> None:
        profiles, self._profiles = self._profiles, None
        if profiles is None:
            return
        tables = [f"{name}\n{self._table(profile)}" for name, profile in profiles.items()]
        text = "\n".join([f"Profile of {self._stage} on rank {self._rank}", *tables])
        if self._filename is not None or self._dumps:
            self._folder.mkdir(parents=True, exist_ok=True)
        if self._filename is not None:
            path = self._folder / f"{self._stage}-{self._filename}-rank{self._rank}.txt"
            path.write_text(text + "\n", encoding="utf-8")
        elif self._rank == 0:
            print(text, file=sys.stderr, flush=True)
        if self._dumps:
            for name, profile in profiles.items():
                profile.dump_stats(self._folder / f"{self._stage}-{name.replace('/', '_')}-rank{self._rank}.prof")

    def _table(self, profile: cProfile.Profile) -> str:
        table = io.StringIO()
        stats = pstats.Stats(profile, stream=table).strip_dirs().sort_stats("cumulative")
        stats.print_stats(self._restriction)
        return table.getvalue()
