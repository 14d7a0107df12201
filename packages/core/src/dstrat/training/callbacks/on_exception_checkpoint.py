"""Callback that saves a checkpoint when training fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.errors import RequestError
from dstrat.launch.failures import kind_of
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import UnusedPaths
from dstrat.training.callbacks.save_schedule import wait_for_writes
from dstrat.training.checkpoint.path import check_writable
from dstrat.training.checkpoint.save import rescue_checkpoint
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.checkpoint.paths import RemotePath
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class OnExceptionCheckpoint(Callback):
    """Save a checkpoint when an exception or a signal ends a fit, to resume with ``fit(ckpt_path=...)``.

    After a first Ctrl-C or SIGTERM all ranks save together.  After another exception the failing rank saves alone, as
    the others may have ended; so a strategy that shards its state saves nothing then.  A second Ctrl-C ends the run at
    once.  The exception is raised in any case.

    Args:
        dirpath: The folder, or its URL in a store that fsspec supports.
        filename: Name of the file without extension; a used name gets a suffix, ``-v1``.

    Attributes:
        ckpt_path: The saved checkpoint; empty without one.

    Raises:
        RequestError: The name is empty.
    """

    runs_last = True
    saves_checkpoints = True

    def __init__(self, dirpath: str | Path | RemotePath, filename: str = "on_exception") -> None:
        if not filename:
            raise RequestError("filename='' is no name: choose one, such as 'on_exception'")
        self.dirpath = as_path(dirpath).absolute()
        self.filename = filename
        self.ckpt_path = ""
        self._has_begun = False
        self._unused = UnusedPaths()

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._has_begun = False  # a callback may serve several fits
        if stage == "fit" and trainer.is_global_zero:
            advice = f"another dirpath to {type(self).__name__}"
            check_writable(as_path(self.dirpath), trainer.strategy.checkpoint_io, advice)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._has_begun = True

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if not self._has_begun:  # before training there is nothing to save
            return
        try:
            if isinstance(exception, Interrupted | Terminated):
                self._save_together(trainer, exception)
            # Another kind is a consequence: this rank has lost the connection to the one that failed, which saves.
            elif isinstance(exception, Exception) and kind_of(exception) == "error":
                self._save_alone(trainer, exception)
        except Exception as error:  # noqa: BLE001 - the exception that ended the run must not be replaced
            _log.error("OnExceptionCheckpoint could not save after %s: %s", type(exception).__name__, error)
        finally:
            self._unused.release()

    def _save_together(self, trainer: Trainer, exception: BaseException) -> None:
        # All ranks write parts of one checkpoint: they need the same path.
        path = trainer.strategy.broadcast(self._path() if trainer.is_global_zero else "")
        remaining, expected = trainer.run.interruption.remaining, trainer.run.save_seconds
        if remaining is not None and expected > remaining and trainer.is_global_zero:
            _log.warning(
                "%s: saving took %.1f s the last time, and %.1f s remain of preemption_deadline=%g: if the job ends "
                "before %s is complete, the checkpoint before it is the newest",
                type(exception).__name__,
                expected,
                remaining,
                trainer.preemption_deadline,
                path,
            )
        trainer.save_checkpoint(path)
        self._note(trainer, path, exception, logs=trainer.is_global_zero)
        remaining = trainer.run.interruption.remaining
        if remaining is not None and trainer.is_global_zero:
            _log.warning("%.1f s remain of preemption_deadline=%g", remaining, trainer.preemption_deadline)

    def _save_alone(self, trainer: Trainer, exception: Exception) -> None:
        if trainer.world_size > 1 and not trainer.strategy.replicates_state:
            _log.warning(
                "OnExceptionCheckpoint saves nothing after %s: with %s no process has the whole state",
                type(exception).__name__,
                type(trainer.strategy).__name__,
            )
            return
        path = self._path()  # of this rank alone: several failing ranks choose different names
        rescue_checkpoint(trainer.run, path)
        self._note(trainer, path, exception, logs=True)

    def _path(self) -> str:
        return self._unused.choose(self.dirpath, self.filename)

    def _note(self, trainer: Trainer, path: str, exception: BaseException, *, logs: bool) -> None:
        wait_for_writes(trainer.strategy)  # the process may end after this hook
        self.ckpt_path = path
        if logs:
            _log.warning("%s after step %d: saved %s", type(exception).__name__, trainer.global_step, path)
