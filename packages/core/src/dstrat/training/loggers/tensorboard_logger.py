"""Logger for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.training.loggers.folder_logger import FolderLogger
from dstrat.training.loggers.logger import Silence, as_numbers, as_pixels, flatten, named_images, require, writer_only

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.tensorboard import SummaryWriter

_HP_METRIC = "hp_metric"
"""The value by which TensorBoard compares runs, if hyperparameters are logged without one."""

_log = logging.getLogger(__name__)


class TensorBoardLogger(FolderLogger):
    """Logger that writes event files for ``tensorboard --logdir``, and ``hparams.json``; needs ``dstrat[tensorboard]``.

    Args:
        save_dir: Folder of all runs; by default the Trainer's ``default_root_dir``.
        name: Subfolder of all versions; None and ``""`` are ``save_dir`` itself.
        version: A number, or the name of a folder; by default the next free number.
        log_graph: Whether to write the graph of the module at the start of a run; the module needs an
            ``example_input_array``.
        default_hp_metric: Whether hyperparameters without values are written with ``hp_metric=-1``.  Otherwise they are
            not written to the event file, which a later ``log_hyperparams(params, metrics)`` can do.
        prefix: Prefix of names, separated by a hyphen.
        sub_dir: Subfolder of the version for the event files.
        **kwargs: Arguments of ``torch.utils.tensorboard.SummaryWriter``, such as ``flush_secs`` and ``max_queue``.

    Raises:
        MissingRequirementError: tensorboard is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "dstrat_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        require("tensorboard", "TensorBoardLogger")
        super().__init__(save_dir, name, version, prefix)
        self._logs_graph, self._default_hp_metric = log_graph, default_hp_metric
        self._sub_dir, self._options = sub_dir or "", kwargs
        self._writer: SummaryWriter | None = None
        self._next_step = 0
        self._purge_step: int | None = None  # of the next event file only

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_writer": None}

    @property
    def experiment(self) -> SummaryWriter | Silence:
        """The ``SummaryWriter``, for other content such as embeddings and figures."""
        return self._open() if self.writes else Silence()

    @writer_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values by name; a dict of values becomes one chart."""
        writer = self._open()
        self._next_step = max(self._next_step, (step or 0) + 1)
        for name, value in as_numbers(metrics, self._prefix).items():
            if isinstance(value, dict):
                writer.add_scalars(name, value, step)
            else:
                writer.add_scalar(name, value, step)

    @writer_only
    def log_hyperparams(
        self, params: Mapping[str, Any], metrics: Mapping[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Write the hyperparameters of a run, with values by which to compare runs.

        Args:
            params: The hyperparameters.
            metrics: Values by name, or one value for ``hp_metric``.
            step: The step of the values.
        """
        from torch.utils.tensorboard.summary import hparams

        self.write_hparams(params)
        if metrics is None:
            metrics = {_HP_METRIC: -1} if self._default_hp_metric else {}
        values = as_numbers(metrics if isinstance(metrics, Mapping) else {_HP_METRIC: metrics})
        if not values:
            return
        self.log_metrics(values, step)
        simple = {name: _simple(value) for name, value in flatten(params).items()}
        writer = self._open()
        # Not add_hparams of the writer, which makes another folder for each call.
        for summary in hparams(simple, values):
            writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]  # torch declares it as None

    @override
    @writer_only
    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Write the graph of a module, with ``TensorBoardLogger(log_graph=True)``; ``forward`` is traced for it.

        Args:
            model: The module, with all its parameters on one device.
            input_array: A tensor or a tuple of positional arguments; by default the module's ``example_input_array``.
        """
        if not self._logs_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if reason := _no_graph(model, example):
            _log.warning("TensorBoardLogger(log_graph=True) writes no graph of %s: %s", type(model).__name__, reason)
        else:
            from dstrat.training.module.export import traceable

            with traceable(model):
                self._open().add_graph(model, example)

    @writer_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            key: Their name; several are called ``key/0``, ``key/1`` ...
            images: Tensors of channels, height and width, or of height and width; arrays of height, width and channels;
                images of PIL; or paths of files.
            step: Number of optimizer steps taken.
            **kwargs: For ``SummaryWriter.add_image``, such as ``dataformats``.
        """
        for tag, image in named_images(key, images):
            if "dataformats" in kwargs:
                self._open().add_image(tag, image, step, **kwargs)
            else:
                pixels = as_pixels(image)
                layout = "HWC" if pixels.ndim == 3 else "HW"
                self._open().add_image(tag, pixels, step, dataformats=layout, **kwargs)

    @writer_only
    def log_histogram(self, key: str, values: Tensor | np.ndarray[Any, Any], step: int | None = None) -> None:
        """Write the distribution of numbers, such as those of a weight."""
        self._open().add_histogram(key, values, step)

    @writer_only
    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Write a text, which is shown as Markdown."""
        self._open().add_text(key, text, step)

    @writer_only
    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write a table, of columns and rows or a data frame, as text: TensorBoard shows it."""
        if dataframe is not None:
            columns, data = list(dataframe.columns), dataframe.to_numpy().tolist()
        rows = [list(columns or []), ["---"] * len(columns or []), *(data or [])]
        lines = ("|".join(["", *(str(cell).replace("|", "\\|") for cell in row), ""]) for row in rows)
        self.log_text(key, "\n".join(lines), step)

    @override
    def bookmark(self) -> int | None:
        """Return the step after the last one with logged numbers; None if an earlier job may have logged later ones."""
        return self._next_step if self._next_step or self._version is None else None

    @override
    def rewind(self, bookmark: int) -> None:
        """Let TensorBoard hide earlier event files from that step on."""
        self._next_step = self._purge_step = bookmark

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

            purge = {} if self._purge_step is None else {"purge_step": self._purge_step}
            self._writer = SummaryWriter(str(self.claimed_dir / self._sub_dir), **{**self._options, **purge})
            # Once: the file of a later run, such as a test, would hide what this attempt has written.
            self._purge_step = None
        return self._writer


def _simple(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _no_graph(model: Module, example: Any) -> str | None:
    """Return the reason why a module cannot be traced; None if it can."""
    from torch import Tensor

    if example is None:
        return "it has no example_input_array, and no input was passed"
    if not isinstance(example, Tensor | tuple):
        return f"its example input is a {type(example).__name__}: make it a tensor, or a tuple of forward's arguments"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its parameters have no values yet, because the strategy makes them later"
    return None
