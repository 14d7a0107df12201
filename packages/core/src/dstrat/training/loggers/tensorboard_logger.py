"""Logged values for TensorBoard."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import MissingRequirementError
from dstrat.plugins.known import pip_command
from dstrat.training.loggers.logger import Logger
from dstrat.training.loggers.version_folder import VersionFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.utils.tensorboard import SummaryWriter


class TensorBoardLogger(Logger):
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
        if find_spec("tensorboard") is None:
            raise MissingRequirementError(
                f"TensorBoardLogger needs tensorboard, which is not installed: {pip_command('dstrat[tensorboard]')}"
            )
        self.root_dir = None if save_dir is None else Path(save_dir)
        self._folder = VersionFolder(name, version)
        self._writer: SummaryWriter | None = None

    @property
    def log_dir(self) -> Path:
        return self._folder.claim(self.root_dir)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._open()
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        simple = {name: _simple(value) for name, value in params.items()}
        writer = self._open()
        for summary in hparams(simple, {}):
            writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch declares it as None

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    @override
    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.log_dir))
        return self._writer


def _simple(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
