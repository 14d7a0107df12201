"""Callback that reports metrics and checkpoints to Ray Train and Ray Tune."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

CHECKPOINT_NAME = "checkpoint"
"""Name of dstrat's checkpoint in the folder that Ray calls a checkpoint."""


class RayReportCallback(Callback):
    """Report the logged values, and a checkpoint, at the end of training epochs, after their validation.

    In a worker of Ray Train it calls ``ray.train.report``, in all ranks; in a trial of Ray Tune, whose Trainer runs in
    the trial's own process, ``ray.tune.report``.  The report has the logged values, ``epoch`` and ``step``.

    Args:
        every_n_epochs: Report at the end of every n-th epoch.
        save_checkpoints: Whether reports have a checkpoint; :func:`latest_checkpoint` continues from it.
        save_weights_only: Whether checkpoints have the module's weights only.
        dirpath: Folder in which checkpoints are written before Ray copies them; by default one for temporary files.
            With workers on several machines it is required, in a file system that they share.

    Raises:
        RequestError: An argument is out of range.
    """

    runs_last = True
    saves_checkpoints = True

    def __init__(
        self,
        *,
        every_n_epochs: int = 1,
        save_checkpoints: bool = True,
        save_weights_only: bool = False,
        dirpath: str | Path | None = None,
    ) -> None:
        if isinstance(every_n_epochs, bool) or not isinstance(every_n_epochs, int) or every_n_epochs < 1:
            raise RequestError(f"every_n_epochs needs a number of epochs from 1, not {every_n_epochs!r}")
        self.every_n_epochs = every_n_epochs
        self.save_checkpoints, self.save_weights_only = save_checkpoints, save_weights_only
        self.dirpath = None if dirpath is None else Path(dirpath)

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage != "fit":
            return
        if _session() is None:
            raise MisuseError(
                "RayReportCallback reports to Ray, and this process is neither a worker of Ray Train nor a trial of "
                "Ray Tune: fit in the function of a TorchTrainer or of a Tuner, or leave the callback out"
            )
        if self.save_checkpoints and self.dirpath is None and trainer.num_nodes > 1:
            raise RequestError(
                f"RayReportCallback() writes checkpoints of num_nodes={trainer.num_nodes} machines to one folder: pass "
                "dirpath=..., in a file system that they share, or save_checkpoints=False"
            )

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if (trainer.current_epoch + 1) % self.every_n_epochs:
            return
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        values |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if not self.save_checkpoints:
            _report(values, None)
            return
        folder = self._new_folder(trainer)
        try:
            trainer.save_checkpoint(folder / CHECKPOINT_NAME, weights_only=self.save_weights_only)
            # All ranks have written to one folder, which rank 0 hands over.
            _report(values, folder if trainer.is_global_zero else None)
        finally:
            if trainer.is_global_zero:
                shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self, trainer: Trainer) -> Path:
        """Return a new folder, the same in all ranks."""
        path = ""
        if trainer.is_global_zero:
            if self.dirpath is not None:
                self.dirpath.mkdir(parents=True, exist_ok=True)
            path = tempfile.mkdtemp(prefix="dstrat-ray-", dir=self.dirpath)
        return Path(trainer.strategy.broadcast(path))


def latest_checkpoint() -> str | None:
    """Return the checkpoint that Ray Train or Tune wants this run to continue from, for ``ckpt_path``; None if none.

    It is there after Ray has restarted workers or a trial, and where the user has passed one to Ray.  A checkpoint of a
    remote store is downloaded to a folder for temporary files.

    Raises:
        MisuseError: This process is neither a worker of Ray Train nor a trial of Ray Tune.
    """
    session = _session()
    if session is None:
        raise MisuseError("latest_checkpoint() asks Ray, and this process is neither a worker of Ray Train nor a trial")
    import ray.train
    import ray.tune

    checkpoint = ray.train.get_checkpoint() if session == "train" else ray.tune.get_checkpoint()
    if checkpoint is None:
        return None
    is_local = Path(checkpoint.path).is_dir()
    return str(Path(checkpoint.path if is_local else checkpoint.to_directory(), CHECKPOINT_NAME))


def _session() -> Literal["train", "tune"] | None:
    """Return which of Ray's libraries runs this process; None if neither does."""
    import ray.train
    import ray.tune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns where there is no trial, which is what is asked
        if ray.tune.get_context().get_trial_id() is not None:
            return "tune"
    try:
        ray.train.get_context().get_world_size()
    except RuntimeError:  # the documented way to ask
        return None
    return "train"


def _report(values: dict[str, Any], folder: Path | None) -> None:
    import ray.train
    import ray.tune

    library = ray.tune if _session() == "tune" else ray.train
    checkpoint = None if folder is None else library.Checkpoint.from_directory(os.fspath(folder))
    library.report(values, checkpoint=checkpoint)
