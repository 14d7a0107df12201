"""Restarted fits: save points for a later attempt, and continuation from that of an earlier one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import as_path
from dstrat.launch.external import history
from dstrat.launch.recovery import SavePoint, StepRecord, record_save_point, this_attempt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.training.loggers.logger import Logger
    from dstrat.training.run import Run

_log = logging.getLogger(__name__)


def join_attempt(run: Run) -> None:
    """Look up this attempt of the job, and let the loggers of global rank 0 write to the folders of the last one."""
    run.attempt = this_attempt()
    if run.attempt is None or not run.is_fitting:
        return
    # By launch, as a script may call fit several times, and a restart repeats those before the failed one.
    run.save_point = run.attempt.save_point(history.current_launch)
    if run.save_point is not None and run.is_global_zero:
        for logger, folder in _of_loggers(run, run.save_point.log_dirs):
            if folder is not None:
                logger.join(Path(folder))


def rewind_loggers(run: Run) -> None:
    """Remove the loggers' values of after the save point; without a save point, record the beginning of the fit."""
    if run.attempt is None or not run.is_fitting or not run.is_global_zero:
        return
    if run.save_point is None:
        _record(run, None)  # a restart before the first checkpoint rewinds to here
    else:
        for logger, bookmark in _of_loggers(run, run.save_point.bookmarks):
            if bookmark is not None:
                logger.rewind(bookmark)


def _of_loggers(run: Run, values: Sequence[Any]) -> list[tuple[Logger, Any]]:
    """Return each logger with its value of the save point; nothing where the fit has changed its loggers since."""
    if len(values) != len(run.loggers):
        _log.warning(
            "this attempt begins with other loggers (%d) than the checkpoint was saved with (%d): values that were "
            "logged after the checkpoint are not removed",
            len(run.loggers),
            len(values),
        )
        return []
    return list(zip(run.loggers, values, strict=True))


def count_steps(run: Run) -> None:
    """Record the step of this rank after each batch, for the supervisor, which reads it also after SIGKILL."""
    if run.attempt is None or not run.is_fitting:
        return

    def start() -> None:
        record, loop = StepRecord(run.fit_loop.global_step), run.fit_loop
        # Before the hooks of callbacks: a batch counts even if one of them fails.
        run.hooks.insert("on_train_batch_end", lambda *_: record.count_batch(loop.global_step))

    run.hooks.insert("on_train_start", start)


def continued_checkpoint(run: Run) -> str | None:
    """Return the checkpoint from which this attempt continues; None if it starts as the user requested."""
    point = run.save_point
    return None if point is None else point.checkpoint


def record_checkpoint(run: Run, path: str | Path) -> None:
    """Record a checkpoint, before it is written, for a later attempt."""
    if run.attempt is not None and run.is_fitting and run.is_global_zero:
        _record(run, str(as_path(path).absolute()))


def _record(run: Run, checkpoint: str | None) -> None:
    # Folders and bookmarks of now: values that are logged after this are repeated by the next attempt.
    folders = [logger.log_dir for logger in run.loggers]
    record_save_point(
        SavePoint(
            launch=history.current_launch,
            checkpoint=checkpoint,
            step=run.fit_loop.global_step,
            log_dirs=[None if folder is None else str(folder) for folder in folders],
            bookmarks=[logger.bookmark() for logger in run.loggers],
        )
    )
