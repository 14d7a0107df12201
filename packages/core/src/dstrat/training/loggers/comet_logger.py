"""Logger for Comet."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from dstrat.checkpoint.paths import home_path
from dstrat.training.loggers.logger import (
    Logger,
    Silence,
    as_mapping,
    as_numbers,
    as_pixels,
    named_images,
    require,
    writer_only,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from comet_ml import CometExperiment  # type: ignore[import-not-found,unused-ignore]  # an extra
    from torch.nn import Module


class CometLogger(Logger):
    """Logger for an experiment of Comet; needs the extra ``dstrat[comet]``.

    The first write opens the experiment.  At the end of a fit, validation, test or prediction it is flushed, and stays
    open for the next one and for the user; ``experiment.end()``, or the end of the process, writes the archive of an
    offline experiment.  In a process started for the run the experiment ends with the run.  Comet's own logging of
    torch is off.

    Args:
        api_key: API key of the account; by default that of ``comet login``, or ``COMET_API_KEY``.
        workspace: Workspace of the project; by default the account's.
        project: Project of the experiment; by default Comet's.
        experiment_key: Id of the experiment: 32 to 50 letters and digits.
        mode: ``"get_or_create"`` continues an experiment if it exists, ``"get"`` requires one, ``"create"`` makes one.
        online: Whether to send values; False writes an archive for ``comet upload``.
        prefix: Prefix of names, separated by an underscore.
        **kwargs: Arguments of ``comet_ml.ExperimentConfig``, such as ``name``, ``tags`` and ``offline_directory``, by
            default the Trainer's ``default_root_dir``.

    Raises:
        MissingRequirementError: comet_ml is not installed.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        require("comet_ml", "CometLogger", extra="comet")
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # Comet reads it at import
        folder = kwargs.pop("offline_directory", None)
        self.root_dir = None if folder is None else home_path(folder)
        self._start = {"api_key": api_key, "workspace": workspace, "mode": mode, "online": online}
        self._project, self._key, self._prefix, self._config = project, experiment_key, prefix, kwargs
        self._experiment: CometExperiment | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_experiment": None}  # connections cannot be pickled; the key reopens the experiment

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The experiment's key; None before it is opened, unless the user has passed it."""
        return self._key

    @property
    def experiment(self) -> CometExperiment | Silence:
        """The experiment of Comet, for other content."""
        return self._open() if self.writes else Silence()

    @writer_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        values = as_numbers(metrics)
        epoch = values.pop("epoch", None)  # an argument of its own in Comet
        self._open().log_metrics(values, prefix=self._prefix, step=step, epoch=epoch)

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._open().log_parameters(dict(as_mapping(params)), nested_support=True)

    @override
    @writer_only
    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Write the layers of a module."""
        self._open().set_model_graph(model)

    @writer_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            key: Their name; several are called ``key/0``, ``key/1`` ...
            images: Tensors of channels, height and width, or of height and width; arrays of height, width and channels;
                images of PIL; or paths of files.
            step: Number of optimizer steps taken.
            **kwargs: For ``CometExperiment.log_image``.
        """
        for name, image in named_images(key, images):
            self._open().log_image(as_pixels(image), name=name, step=step, **kwargs)

    @writer_only
    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Write the distribution of numbers, such as those of a weight."""
        numbers = values.detach().cpu().numpy() if hasattr(values, "detach") else values
        self._open().log_histogram_3d(numbers, name=key, step=step)

    @writer_only
    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Write a text; its name is kept as metadata."""
        self._open().log_text(text, step=step, metadata={"name": key})

    @writer_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write a table, of columns and rows or a data frame, as the file ``<key>.csv``."""
        name = f"{key}.csv" if step is None else f"{key}-{step}.csv"  # Comet's log_table has no step
        if dataframe is not None:
            self._open().log_table(name, dataframe)
        else:
            self._open().log_table(name, data or [], headers=columns or False)

    @override
    @writer_only
    def finalize(self, status: str) -> None:
        if self._experiment is None:
            return
        if parent_process() is None:  # the user's process, in which the experiment stays open
            self._experiment.flush()
        else:  # a rank exits without the atexit functions in which Comet ends experiments
            self._experiment.end()
            self._experiment = None

    def _open(self) -> CometExperiment:
        if self._experiment is None:
            import comet_ml

            folder = self.root_dir or Path.cwd()
            config = comet_ml.ExperimentConfig(offline_directory=str(folder), **self._config)
            self._experiment = comet_ml.start(
                project=self._project, experiment_key=self._key, experiment_config=config, **self._start
            )
            self._key, self._project = self._experiment.get_key(), self._experiment.project_name
            self._experiment.log_other("Created from", "dstrat")
        return self._experiment
