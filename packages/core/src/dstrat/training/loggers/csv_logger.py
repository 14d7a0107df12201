"""Logger for a CSV file."""

from __future__ import annotations

import csv
import os
from io import StringIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.checkpoint.paths import home_path
from dstrat.errors import MisuseError, RequestError
from dstrat.training.loggers.folder_logger import FolderLogger
from dstrat.training.loggers.logger import as_numbers, writer_only

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import FileIO
    from pathlib import Path

_FILE = "metrics.csv"


class CSVLogger(FolderLogger):
    """Logger that writes ``metrics.csv``, with a row for each write of values, and ``hparams.json``.

    Each row is written at once, so that a killed run loses nothing.  A new name becomes a new column: the file is then
    rewritten, and replaced atomically.

    Args:
        save_dir: Folder of all runs; by default the Trainer's ``default_root_dir``.
        name: Subfolder of all versions; None and ``""`` are ``save_dir`` itself.
        version: A number, or the name of a folder; by default the next free number.  Rows are appended to an existing
            version.
        prefix: Prefix of names, separated by a hyphen.
        flush_logs_every_n_steps: Number of steps whose rows are written together, for slow file systems.  Rows are also
            written at the end of a run, and of an epoch that takes longer than a few seconds.

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

    def __getstate__(self) -> dict[str, Any]:
        self._flush()  # a copy would write the same rows again
        return {**self.__dict__, "_table": None}

    @property
    @override
    def metrics_file(self) -> Path | None:
        return None if self.log_dir is None else home_path(self.log_dir) / _FILE  # a subclass's may be a str

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row; without a step it has the number of rows before it.

        Raises:
            MisuseError: A value is named as the column of the steps.
        """
        values = as_numbers(metrics, self._prefix)
        if "step" in values:
            raise MisuseError("CSVLogger has a column 'step' of its own: give the value 'step' another name")
        step = self._num_rows if step is None else step
        self._rows.append({"step": step, **values})
        self._num_rows += 1
        # abs, since the steps of a later run start at 0 again.
        if self._flush_every == 1 or abs(step - self._flushed_step) >= self._flush_every:
            self._flushed_step = step
            self._flush()

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.write_hparams(params)

    @override
    def bookmark(self) -> int:
        """Return the number of rows in the table."""
        self._flush()  # rows in memory would be lost with this process, and counted
        return _count_rows(self.claimed_dir / _FILE)

    @override
    @writer_only
    def rewind(self, bookmark: int) -> None:
        _cut_rows(self.claimed_dir / _FILE, bookmark)

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
        """Write the buffered rows."""
        rows, self._rows = self._rows, []  # first: rows that cannot be written must not block later ones
        if rows:
            if self._table is None:
                self._table = CSVTable(self.claimed_dir / _FILE)
            self._table.add(*rows)


class CSVTable:
    """A CSV file to which rows, and if necessary columns, are appended.

    Args:
        path: The file, which may exist.
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
        return self._path.open("ab", buffering=0)  # a buffer would write its content again after a failed write

    def add(self, *rows: Mapping[str, float]) -> None:
        """Append rows, and columns for new names.

        Raises:
            OSError: The disk is full; the file is not changed then.
        """
        new = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in self._columns]
        if new:
            self._add_columns(new)
        lines = StringIO(newline="")
        csv.writer(lines).writerows([row.get(name, "") for name in self._columns] for row in rows)
        self._append(lines.getvalue().encode())

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)  # after a failed write the position is beyond the end
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Flush the rows to the disk."""
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
        self._file.close()  # it would append to the replaced file
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


def _count_rows(path: Path) -> int:
    """Return the number of complete rows below the header."""
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def _cut_rows(path: Path, num_rows: int) -> None:
    """Remove all rows but the first ones; without rows the header too."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    temporary = path.with_suffix(".csv.tmp")
    temporary.write_bytes(b"".join(lines[: num_rows + 1] if num_rows else ()))
    temporary.replace(path)


def _cut_broken_row(path: Path) -> None:
    """Remove a last row that a killed process left half-written."""
    with path.open("r+b") as file:  # binary, since a row may end within a character
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
