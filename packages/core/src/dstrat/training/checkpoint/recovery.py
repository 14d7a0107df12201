"""Restarted fits: save points for a later attempt, and continuation from that of an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.launch.external import history
from dstrat.launch.recovery import SavePoint, StepRecord, record_save_point, this_attempt
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class StepCounter(Callback):
    """Record the step of each rank for the supervisor, which reads it also after the rank was killed.

    The Trainer adds it with ``max_restarts``.
    """

    def __init__(self) -> None:
        self._record: StepRecord | None = None

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._record = None if trainer.context.attempt is None else StepRecord(trainer.global_step)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._record is not None:
            self._record.count_batch(trainer.global_step)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._record = None


def join_attempt(trainer: Trainer) -> None:
    """Look up this attempt of the job, and let the loggers of global rank 0 write to the folders of the last one."""
    context = trainer.context
    context.attempt = this_attempt()
    if context.attempt is None or not trainer.is_fitting:
        return
    # By launch, as a script may call fit several times, and a restart repeats those before the failed one.
    context.save_point = context.attempt.save_point(history.current_launch)
    if context.save_point is not None and trainer.is_global_zero:
        for logger, folder in zip(trainer.loggers, context.save_point.log_dirs, strict=True):
            if folder is not None:
                logger.join(Path(folder))


def rewind_loggers(trainer: Trainer) -> None:
    """Remove the loggers' values of after the save point; without a save point, record the beginning of the fit."""
    context = trainer.context
    if context.attempt is None or not trainer.is_fitting or not trainer.is_global_zero:
        return
    if context.save_point is None:
        _record(trainer, None)  # a restart before the first checkpoint rewinds to here
    else:
        for logger, bookmark in zip(trainer.loggers, context.save_point.bookmarks, strict=True):
            if bookmark is not None:
                logger.rewind(bookmark)


def continued_checkpoint(trainer: Trainer) -> str | None:
    """Return the checkpoint from which this attempt continues; None if it starts as the user requested."""
    point = trainer.context.save_point
    return None if point is None else point.checkpoint


def record_checkpoint(trainer: Trainer, path: str | Path) -> None:
    """Record a checkpoint, before it is written, for a later attempt."""
    if trainer.context.attempt is not None and trainer.is_fitting and trainer.is_global_zero:
        _record(trainer, str(as_path(path).absolute()))


def _record(trainer: Trainer, checkpoint: str | None) -> None:
    # Folders and bookmarks of now: values that are logged after this are repeated by the next attempt.
    folders = [logger.log_dir for logger in trainer.loggers]
    record_save_point(
        SavePoint(
            launch=history.current_launch,
            checkpoint=checkpoint,
            step=trainer.global_step,
            log_dirs=[None if folder is None else str(folder) for folder in folders],
            bookmarks=[logger.bookmark() for logger in trainer.loggers],
        )
    )
