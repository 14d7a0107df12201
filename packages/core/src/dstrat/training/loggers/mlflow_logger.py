"""Logger for MLflow."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, Literal

from dstrat.checkpoint.paths import home_path
from dstrat.training.loggers.logger import (
    Logger,
    Silence,
    Uploads,
    as_numbers,
    as_pixels,
    flatten,
    named_images,
    require,
    writer_only,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found,unused-ignore]  # an extra

    from dstrat.training.loggers.logger import SavedCheckpoints

_STATUS = {"success": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MAX_PARAMETERS = 100  # MLflow's limit of one request
_SECONDS_OF_SILENCE = 10.0  # before a warning

_log = logging.getLogger(__name__)


class MLFlowLogger(Logger):
    """Logger for a run of MLflow; needs the extra ``dstrat[mlflow]``.

    The first write creates the run; a later fit or test continues it.

    Args:
        experiment_name: Experiment of the run; created if it does not exist.
        run_name: Displayed name of the run; by default MLflow's.
        tracking_uri: The server or database; by default ``MLFLOW_TRACKING_URI``, and without that the file
            ``mlflow.db`` in ``save_dir``.
        tags: Tags of the run.
        save_dir: Folder of the database and, without a server, of uploads; by default the Trainer's
            ``default_root_dir``.
        log_model: Whether to upload checkpoints: True uploads the best one at the end, ``"all"`` each one after its
            save by a ``ModelCheckpoint``.
        prefix: Prefix of names, separated by a hyphen.
        artifact_location: Location of uploads, for a new experiment.
        run_id: Id of a run to continue.
        synchronous: Whether each write waits for its completion; by default MLflow decides.

    Raises:
        MissingRequirementError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "dstrat_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | Path | None = None,
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        require("mlflow", "MLFlowLogger")
        self.root_dir = None if save_dir is None else home_path(save_dir)
        self._experiment_name, self._run_name, self._tags = experiment_name, run_name, dict(tags or {})
        self._uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._prefix, self._artifact_location, self._run_id = prefix, artifact_location, run_id
        self._waits = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment: str | None = None
        self._client: MlflowClient | None = None
        self._uploads = Uploads(log_model, self._upload)

    @property
    def name(self) -> str:
        """The experiment."""
        return self._experiment_name

    @property
    def version(self) -> str | None:
        """The run's id; None before the first write."""
        return self._run_id

    @property
    def experiment(self) -> MlflowClient | Silence:
        """The client of MLflow; :attr:`version` is the run's id."""
        return self._open() if self.writes else Silence()

    @property
    def run_id(self) -> str | None:
        """The run's id; reading it creates the run."""
        if self._run_id is None and self.writes:
            self._open()
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The experiment's id; reading it creates the run."""
        if self._experiment is None and self.writes:
            self._open()
        return self._experiment

    @writer_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        from mlflow.entities import Metric  # type: ignore[import-not-found,unused-ignore]  # an extra

        now = int(time() * 1000)
        values = [Metric(name, value, now, step or 0) for name, value in as_numbers(metrics, self._prefix).items()]
        client = self._open()
        with self._warn_if_slow():
            client.log_batch(self._run_id, metrics=values, **self._waits)

    @writer_only
    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        settings = [Param(name, str(value)) for name, value in flatten(params).items()]
        for start in range(0, len(settings), _MAX_PARAMETERS):
            self._open().log_batch(self._run_id, params=settings[start : start + _MAX_PARAMETERS], **self._waits)

    @writer_only
    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Write images.

        Args:
            key: Their name; several are called ``key/0``, ``key/1`` ...
            images: Tensors of channels, height and width, or of height and width; arrays of height, width and channels;
                images of PIL; or paths of files.
            step: Number of optimizer steps taken.
            **kwargs: For ``MlflowClient.log_image``.
        """
        for name, image in named_images(key, images):
            self._open().log_image(self._run_id, as_pixels(image), key=name, step=step or 0, **kwargs)

    @writer_only
    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Upload a text, as the file ``<key>.txt`` or, with a step, ``<key>/<step>.txt``."""
        self._open().log_text(self._run_id, text, f"{key}.txt" if step is None else f"{key}/{step}.txt")

    @writer_only
    def after_save_checkpoint(self, checkpoint_callback: SavedCheckpoints) -> None:
        self._uploads.take(checkpoint_callback)

    @writer_only
    def finalize(self, status: str) -> None:
        if status == "success":
            self._uploads.finish()
        client, self._client = self._client, None  # a later write makes the run active again
        if client is not None:
            with self._warn_if_slow():
                client.set_terminated(self._run_id, _STATUS[status])

    def _open(self) -> MlflowClient:
        if self._client is None:
            with self._warn_if_slow():
                self._client = self._connect()
        return self._client

    def _connect(self) -> MlflowClient:
        """Return a client, after creating or continuing the run."""
        from mlflow.tracking import MlflowClient
        from mlflow.tracking.context.registry import resolve_tags

        client = MlflowClient(tracking_uri=self._uri or self._database())
        if self._run_id is None:
            tags = resolve_tags(self._tags)  # adds user, source and commit, as mlflow.start_run does
            run = client.create_run(self._find_experiment(client), tags=tags, run_name=self._run_name)
            self._run_id = run.info.run_id
        else:
            client.update_run(self._run_id, status="RUNNING")
            run = client.get_run(self._run_id)
        self._experiment = str(run.info.experiment_id)
        return client

    def _find_experiment(self, client: MlflowClient) -> str:
        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is not None:
            return str(experiment.experiment_id)
        artifacts = self._artifact_location
        if artifacts is None and not self._uri:  # MLflow would put them into the working directory
            artifacts = (self._folder() / "mlartifacts").as_uri()
        return str(client.create_experiment(self._experiment_name, artifact_location=artifacts))

    @contextmanager
    def _warn_if_slow(self) -> Iterator[None]:
        """Log a warning if a request takes long: MLflow retries for minutes without a message."""
        line = (
            "MLFlowLogger waits for an answer of %r: MLflow gives up after MLFLOW_HTTP_REQUEST_MAX_RETRIES retries, "
            "which may take minutes; check the tracking_uri, or set a smaller number"
        )
        timer = threading.Timer(_SECONDS_OF_SILENCE, _log.warning, (line, self._uri or self._database()))
        timer.daemon = True  # a process that ends meanwhile does not wait for it
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _database(self) -> str:
        return f"sqlite:///{self._folder() / 'mlflow.db'}"

    def _folder(self) -> Path:
        folder = (self.root_dir or Path.cwd()).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _upload(self, path: Path, names: list[str]) -> None:
        client = self._open()
        if path.is_dir():
            client.log_artifacts(self._run_id, str(path), artifact_path=f"checkpoints/{path.name}")
        else:
            client.log_artifact(self._run_id, str(path), artifact_path="checkpoints")
        if "best" in names:
            client.set_tag(self._run_id, "best_checkpoint", path.name)
