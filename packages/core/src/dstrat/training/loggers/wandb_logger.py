"""Logger for Weights & Biases."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dstrat.checkpoint.paths import home_path
from dstrat.errors import MisuseError
from dstrat.training.loggers.logger import Logger, Silence, Uploads, as_mapping, as_numbers, require, writer_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module
    from wandb import Run  # type: ignore[import-not-found,unused-ignore]  # an extra

    from dstrat.training.loggers.logger import SavedCheckpoints

STEP = "trainer/global_step"

_log = logging.getLogger(__name__)


class WandbLogger(Logger):
    """Logger for a run of Weights & Biases; needs the extra ``dstrat[wandb]``.

    The first write opens the run, and the end of the fit, validation, test or prediction finishes it; a later one
    continues it.  A run in progress is used instead, and not finished.  The axis of charts is the number of optimizer
    steps.

    Args:
        name: Displayed name of the run; by default W&B's.
        save_dir: Folder with the folder ``wandb``; by default the Trainer's ``default_root_dir``.
        version: Id of the run, possibly of one to continue; by default a new one.
        offline: Whether to write files only, for ``wandb sync``.
        dir: The same as ``save_dir``.
        id: The same as ``version``.
        anonymous: Whether W&B may log without an account.
        project: Project of the run; by default ``WANDB_PROJECT``, and without that ``dstrat_logs``.
        log_model: Whether to upload checkpoints as artifacts: True uploads the best one at the end, ``"all"`` each one
            after its save by a ``ModelCheckpoint``.
        experiment: The user's own run, which is not finished, and whose charts keep their axis; arguments of
            ``wandb.init`` have no effect then.
        prefix: Prefix of names, separated by a hyphen.
        checkpoint_name: Name of the artifacts; by default ``model-`` and the run's id.
        add_file_policy: ``"mutable"`` copies a file before its upload, ``"immutable"`` relies on it not changing.
        **kwargs: Arguments of ``wandb.init``.

    Raises:
        MissingRequirementError: wandb is not installed.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        **Logger.retired_members,
        "download_artifact": "use_artifact(name).download(folder) does that in a run",
    }

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,  # noqa: A002 - as wandb.init calls it
        id: str | None = None,  # noqa: A002 - as wandb.init calls it
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        require("wandb", "WandbLogger")
        folder = dir if save_dir is None else save_dir
        self.root_dir = None if folder is None else home_path(folder)
        self._run, self._is_shared = experiment, experiment is not None
        self._id, self._run_name = version or id, name
        self._project = project or os.environ.get("WANDB_PROJECT", "dstrat_logs")
        self._options = {"mode": "offline"} if offline else {}
        self._options |= {"anonymous": "allow"} if anonymous else {}
        self._options |= kwargs
        self._prefix = prefix
        self._artifact_name, self._file_policy = checkpoint_name, add_file_policy
        self._uploads = Uploads(log_model, self._upload)
        self._watched: list[tuple[Module, dict[str, Any]]] = []

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's id; None before the first write."""
        return self._id if self._run is None else self._run.id

    @property
    def experiment(self) -> Run | Silence:
        """The run of W&B."""
        return self._open() if self.writes else Silence()

    @writer_only
    def start_run(self) -> None:
        if self._watched:  # which registers W&B's hooks before the first step
            self._open()

    @writer_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values by name; W&B shows a tensor or array with several elements as a histogram."""
        # As a value: W&B's own step must never decrease, and that of a later validation or test does.
        axis = {} if step is None else {STEP: step}
        self._open().log({**as_numbers(metrics, self._prefix, keeps_arrays=True), **axis})

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._open().config.update(dict(as_mapping(params)), allow_val_change=True)

    @writer_only
    def watch(
        self,
        model: Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Write histograms of gradients and weights, and the graph, with W&B until the end of the run.

        A call before a run takes effect at its start.  Sharded modules are not watched, which is logged, since one
        process does not have them in full.

        Args:
            model: The module, or a submodule.
            log: The histograms to write.
            log_freq: Number of batches between two writes.
            log_graph: Whether to write the graph.
        """
        self._watched.append((model, {"log": log, "log_freq": log_freq, "log_graph": log_graph}))
        if self._run is not None:
            self._watch(*self._watched[-1])

    @writer_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write a table, of columns and rows or a data frame; its cells may be images and other media of W&B."""
        import wandb

        self.log_metrics({key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    @writer_only
    def log_text(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Write texts, which W&B shows as a table."""
        self.log_table(key, columns, data, dataframe, step)

    @writer_only
    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Write images: tensors, arrays, images of PIL or paths.

        Args:
            key: Their name.
            images: The images.
            step: Number of optimizer steps taken.
            **kwargs: Lists of arguments of ``wandb.Image``, one for each image, such as ``caption=["a", "b"]``.
        """
        self._log_media("Image", key, images, step, kwargs)

    @writer_only
    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Write sounds: arrays or paths; lists of arguments are for ``wandb.Audio``, such as ``sample_rate=[8000]``."""
        self._log_media("Audio", key, audios, step, kwargs)

    @writer_only
    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Write videos: arrays or paths; lists of arguments are for ``wandb.Video``, such as ``fps=[8]``."""
        self._log_media("Video", key, videos, step, kwargs)

    @writer_only
    def log_histogram(self, key: str, values: Any, step: int | None = None) -> None:
        """Write the distribution of numbers, such as those of a weight."""
        import wandb

        self.log_metrics({key: wandb.Histogram(values)}, step)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Return an artifact of W&B, and record that the run uses it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @writer_only
    def after_save_checkpoint(self, checkpoint_callback: SavedCheckpoints) -> None:
        self._uploads.take(checkpoint_callback)

    @writer_only
    def finalize(self, status: str) -> None:
        if status == "success":
            self._uploads.finish()
        if self._run is None:
            return
        for model, _ in self._watched:
            self._run.unwatch(model)
        if not self._is_shared:
            self._run.finish(exit_code=0 if status == "success" else 1)
            self._run = None

    def _open(self) -> Run:
        if self._run is None:
            self._run = self._run_in_progress() or self._new_run()
            self._id = self._run.id
            for watched in self._watched:
                self._watch(*watched)
        return self._run

    def _run_in_progress(self) -> Run | None:
        import wandb

        if wandb.run is not None:
            self._is_shared = True
            _log.warning(
                "WandbLogger writes to the run %s, which is in progress: call wandb.finish() first for a new one",
                wandb.run.id,
            )
        return wandb.run

    def _new_run(self) -> Run:
        import wandb

        folder = self.root_dir or Path.cwd()
        folder.mkdir(parents=True, exist_ok=True)
        # "allow" continues the run of a known id, in a later fit or test, and creates one otherwise.
        options = {"project": self._project, "name": self._run_name, "dir": str(folder), "resume": "allow"}
        run = wandb.init(**{**options, "id": self._id, **self._options})
        run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    def _watch(self, model: Module, options: Mapping[str, Any]) -> None:
        from torch.distributed.tensor import DTensor

        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            _log.warning(
                "WandbLogger.watch does not watch %s: its parameters are sharded, and no process has them whole",
                type(model).__name__,
            )
        else:
            self._open().watch(model, **options)

    def _log_media(
        self, kind: str, key: str, items: list[Any], step: int | None, options: Mapping[str, list[Any]]
    ) -> None:
        """Write media of one kind, each with its own arguments."""
        import wandb

        if not isinstance(items, list):
            raise MisuseError(f"log_{kind.lower()}({key!r}) takes a list, and got {type(items).__name__}")
        for name, values in options.items():
            if len(values) != len(items):
                raise MisuseError(
                    f"log_{kind.lower()}({key!r}) takes one {name} for each of the {len(items)}, and got {len(values)}"
                )
        each = [{name: values[index] for name, values in options.items()} for index in range(len(items))]
        media = [getattr(wandb, kind)(item, **arguments) for item, arguments in zip(items, each, strict=True)]
        self.log_metrics({key: media}, step)

    def _upload(self, path: Path, aliases: list[str]) -> None:
        import wandb

        run = self._open()
        artifact = wandb.Artifact(self._artifact_name or f"model-{run.id}", type="model")
        if path.is_dir():
            artifact.add_dir(str(path), policy=self._file_policy)
        else:
            artifact.add_file(str(path), name="model.ckpt", policy=self._file_policy)
        run.log_artifact(artifact, aliases=aliases)
