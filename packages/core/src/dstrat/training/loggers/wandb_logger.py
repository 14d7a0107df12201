"""Logged values for Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.training.loggers.logger import Logger
from dstrat.training.loggers.parameters import as_mapping
from dstrat.training.loggers.requirement import require
from dstrat.training.loggers.uploads import Uploads
from dstrat.training.loggers.writer import Silence, writer_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wandb import Run  # type: ignore[import-not-found,unused-ignore]  # an extra

    from dstrat.training.callbacks.callback import Callback

STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Writes to a run of Weights & Biases; needs the extra ``dstrat[wandb]``.

    The run is opened by the first write and finished at the end of the fit, validation, test or prediction; a later
    one goes on in it.  Charts have the number of optimizer steps as their axis.

    Args:
        name: Shown for the run; by default W&B makes one up.
        save_dir: Holds the folder ``wandb``; by default the trainer's ``default_root_dir``.
        version: The run's id, also of one to go on in; by default a new one.
        project: The project that the run belongs to.
        offline: Whether everything stays in the folder, until ``wandb sync`` sends it.
        log_model: Whether checkpoints become artifacts: True sends the best one at the end, ``"all"`` each when a
            ``ModelCheckpoint`` has saved it.
        experiment: A run of the user's own, which is not finished and keeps the axis of its charts; the other arguments
            do not apply then.
        **init_options: For ``wandb.init``.

    Raises:
        MissingRequirementError: wandb is not installed.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path | None = None,
        version: str | None = None,
        project: str = "dstrat_logs",
        offline: bool = False,
        log_model: bool | Literal["all"] = False,
        experiment: Run | None = None,
        **init_options: Any,
    ) -> None:
        require("wandb", "WandbLogger")
        self.root_dir = None if save_dir is None else Path(save_dir)
        self._given, self._run = experiment, experiment
        self._id, self._project, self._run_name = version, project, name
        self._options = {"mode": "offline"} if offline else {}
        self._options |= init_options
        self._uploads = Uploads(log_model, self._upload)

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's id; None before the run was opened."""
        return self._id if self._run is None else self._run.id

    @property
    def experiment(self) -> Run | Silence:
        """The run of W&B."""
        return self._open() if self.writes else Silence()

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._open().log({**metrics, STEP: step})

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._open().config.update(dict(as_mapping(params)), allow_val_change=True)

    @writer_only
    def after_save_checkpoint(self, checkpoint_callback: Callback) -> None:
        self._uploads.take(checkpoint_callback)

    @writer_only
    def finalize(self, status: str) -> None:
        if status == "success":
            self._uploads.finish()
        if self._run is not None and self._given is None:
            self._run.finish(exit_code=0 if status == "success" else 1)
            self._run = None

    def _open(self) -> Run:
        if self._run is None:
            import wandb

            folder = self.root_dir or Path.cwd()
            folder.mkdir(parents=True, exist_ok=True)
            options = {"project": self._project, "name": self._run_name, "dir": str(folder), "resume": "allow"}
            self._run = wandb.init(**{**options, "id": self._id, **self._options})
            self._id = self._run.id
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    def _upload(self, path: Path, aliases: list[str]) -> None:
        import wandb

        run = self._open()
        artifact = wandb.Artifact(f"model-{run.id}", type="model")
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path), name="model.ckpt")
        run.log_artifact(artifact, aliases=aliases)
