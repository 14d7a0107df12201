"""Logged values for TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.training.loggers.folder_logger import FolderLogger
from dstrat.training.loggers.parameters import flatten
from dstrat.training.loggers.requirement import require
from dstrat.training.loggers.writer import Silence, writer_only

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(FolderLogger):
    """Writes event files that ``tensorboard --logdir`` shows; needs the extra ``dstrat[tensorboard]``.

    Args:
        save_dir: Holds everything; by default the trainer's ``default_root_dir``.
        name: The folder in it that holds all versions.
        version: A number, or a folder's own name; by default the next number that is free.

    Raises:
        MissingRequirementError: tensorboard is not installed.
    """

    def __init__(
        self, save_dir: str | Path | None = None, name: str = "dstrat_logs", version: int | str | None = None
    ) -> None:
        require("tensorboard", "TensorBoardLogger")
        super().__init__(save_dir, name, version)
        self._writer: SummaryWriter | None = None

    @property
    def experiment(self) -> SummaryWriter | Silence:
        """The ``SummaryWriter``, for images, histograms, graphs and what else it takes."""
        return self._open() if self.writes else Silence()

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        simple = {name: _simple(value) for name, value in flatten(params).items()}
        writer = self._open()
        for summary in hparams(simple, {}):
            writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch declares it as None

    @writer_only
    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @override
    @writer_only
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.claimed_dir))
        return self._writer


def _simple(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
