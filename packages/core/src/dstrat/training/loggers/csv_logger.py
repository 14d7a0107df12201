"""Logged values as a table in a CSV file."""

from __future__ import annotations

import csv
import os
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.loggers.folder_logger import FolderLogger
from dstrat.training.loggers.logger import as_numbers, writer_only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import FileIO
    from pathlib import Path


class CSVLogger(FolderLogger):
    """Writes ``metrics.csv``, one row for each step and source of values, and ``hparams.json``.

    Every row is handed to the system at once, so a run that is killed loses nothing.  A name that appears later
    becomes a new column: the file is then written anew and replaced in one move.

    Args:
        save_dir: Holds everything; by default the trainer's ``default_root_dir``.
        name: The folder in it that holds all versions; None and ``""`` are ``save_dir`` itself.
        version: A number, or a folder's own name; by default the next number that is free.  Rows are added to what
            a version has already.
        prefix: Comes before the names of values, with a hyphen between.
        flush_logs_every_n_steps: Steps whose rows are written together, for a slow file system.  Rows also get written
            at the end of a run, and at that of an epoch if it took longer than a few seconds.

    Raises:
        RequestError: The number of steps is not positive.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "dstrat_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise RequestError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps!r}) must be 1, to write each row at "
                "once, or more"
            )
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = flush_logs_every_n_steps
        self._table: CSVTable | None = None
        self._rows: list[dict[str, Any]] = []
        self._flushed_step = self._num_rows = 0

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row; without a step it has the number of rows before it.

        Raises:
            MisuseError: A value is named as the column of the steps.
        """
        values = as_numbers(metrics, self._prefix)
        if "step" in values:
            raise MisuseError("CSVLogger has the steps in the column 'step': give the value another name")
        step = self._num_rows if step is None else step
        self._rows.append({"step": step, **values})
        self._num_rows += 1
        if self._flush_every == 1 or abs(step - self._flushed_step) >= self._flush_every:  # a later run counts anew
            self._flushed_step = step
            self._flush()

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.write_hparams(params)

    @writer_only
    def save(self) -> None:
        self._flush()
        if self._table is not None:
            self._table.sync()

    @override
    @writer_only
    def finalize(self, status: str) -> None:
        self._flush()
        if self._table is not None:
            self._table.close()
            self._table = None

    def _flush(self) -> None:
        """Write the rows that wait; where one cannot be written they are lost, and later ones are not."""
        rows, self._rows = self._rows, []
        if rows:
            if self._table is None:
                self._table = CSVTable(self.claimed_dir / "metrics.csv")
            self._table.add(*rows)


class CSVTable:
    """A CSV file that grows by rows and, when needed, by columns.

    Args:
        path: The file; rows are added to those that are there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        if path.exists():
            _cut_broken_row(path)
            with path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), [])
        self._file = self._open()

    def _open(self) -> FileIO:
        return self._path.open("ab", buffering=0)  # so that nothing waits to be written where a write has failed

    def add(self, *rows: Mapping[str, float]) -> None:
        """Append rows, with new columns where they have new names.

        Raises:
            OSError: The disk is full; the file is as it was then.
        """
        new = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in self._columns]
        if new:
            self._add_columns(new)
        lines = StringIO(newline="")
        csv.writer(lines).writerows([row.get(name, "") for name in self._columns] for row in rows)
        self._append(lines.getvalue().encode())

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)  # where a write failed the position is beyond it
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Bring the rows to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add_columns(self, names: list[str]) -> None:
        columns = [*self._columns, *names]
        temporary = self._path.with_suffix(".csv.tmp")
        try:
            self._copy_to(temporary, columns)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._file.close()
        temporary.replace(self._path)
        self._columns = columns
        self._file = self._open()

    def _copy_to(self, path: Path, columns: Sequence[str]) -> None:
        """Write a table with these columns and the rows of this one."""
        with (
            path.open("w", newline="", encoding="utf-8") as target,
            self._path.open(newline="", encoding="utf-8") as source,
        ):
            writer = csv.writer(target)
            writer.writerow(columns)
            rows = csv.reader(source)
            next(rows, None)
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in rows)


def _cut_broken_row(path: Path) -> None:
    """Remove a last row that a killed process left half-written."""
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
