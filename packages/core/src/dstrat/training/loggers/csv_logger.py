"""Logged values as a table in a CSV file."""

from __future__ import annotations

import csv
import json
import os
from io import StringIO
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import MisuseError
from dstrat.training.loggers.folder_logger import FolderLogger
from dstrat.training.loggers.parameters import as_mapping
from dstrat.training.loggers.writer import writer_only

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
        name: The folder in it that holds all versions.
        version: A number, or a folder's own name; by default the next number that is free.  Rows are added to what
            a version has already.
    """

    def __init__(
        self, save_dir: str | Path | None = None, name: str = "dstrat_logs", version: int | str | None = None
    ) -> None:
        super().__init__(save_dir, name, version)
        self._table: CSVTable | None = None

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row.

        Raises:
            MisuseError: A value is named as the column of the steps.
        """
        if "step" in metrics:
            raise MisuseError("CSVLogger has the steps in the column 'step': give the value another name")
        if self._table is None:
            self._table = CSVTable(self.claimed_dir / "metrics.csv")
        self._table.add({"step": step, **metrics})

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        path = self.claimed_dir / "hparams.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(dict(as_mapping(params)), indent=2, default=str) + "\n")
        temporary.replace(path)

    @writer_only
    def save(self) -> None:
        if self._table is not None:
            self._table.sync()

    @override
    @writer_only
    def finalize(self, status: str) -> None:
        if self._table is not None:
            self._table.close()
            self._table = None


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

    def add(self, row: Mapping[str, float]) -> None:
        """Append a row, with new columns where it has new names.

        Raises:
            OSError: The disk is full; the file is as it was then.
        """
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        line = StringIO(newline="")
        csv.writer(line).writerow([row.get(name, "") for name in self._columns])
        self._append(line.getvalue().encode())

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
