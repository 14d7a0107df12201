"""Saving a checkpoint when training breaks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.checkpoint.paths import place
from dstrat.errors import RequestError
from dstrat.launch.failures import kind_of
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import UnusedPaths
from dstrat.training.callbacks.save_schedule import wait_for_writes
from dstrat.training.checkpoint.save import rescue_checkpoint
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.checkpoint.paths import RemotePath
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class OnExceptionCheckpoint(Callback):
    """Saves a checkpoint when an exception or a signal ends a fit, from which ``fit(ckpt_path=...)`` can go on.

    After a first Ctrl-C or SIGTERM all processes save together.  After another exception the process that raised it
    saves alone, as the others may be gone; so nothing is saved then by a strategy that shards its state.  A second
    Ctrl-C ends the run at once.  The exception itself goes on in any case.

    Args:
        dirpath: The folder, or its URL in a store that fsspec reaches.
        filename: The file's name without extension; one that is taken gets a suffix, ``-v1``.

    Attributes:
        ckpt_path: What was saved, empty before.

    Raises:
        RequestError: The name is empty.
    """

    runs_last = True
    saves_checkpoints = True

    def __init__(self, dirpath: str | Path | RemotePath, filename: str = "on_exception") -> None:
        if not filename:
            raise RequestError("filename='' is no name: choose one, such as 'on_exception'")
        self.dirpath = place(dirpath).absolute()
        self.filename = filename
        self.ckpt_path = ""
        self._has_begun = False
        self._unused = UnusedPaths()

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._has_begun = False

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._has_begun = True

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if not self._has_begun:
            return
        try:
            if isinstance(exception, Interrupted | Terminated):
                self._save_together(trainer, exception)
            elif isinstance(exception, Exception) and kind_of(exception) == "error":
                self._save_alone(trainer, exception)
        except Exception as error:  # noqa: BLE001 - the exception that ended the run is the one to be raised
            _log.error("OnExceptionCheckpoint could not save after %s: %s", type(exception).__name__, error)
        finally:
            self._unused.release()

    def _save_together(self, trainer: Trainer, exception: BaseException) -> None:
        path = trainer.strategy.broadcast(self._path() if trainer.is_global_zero else "")
        trainer.save_checkpoint(path)
        self._note(trainer, path, exception, logs=trainer.is_global_zero)

    def _save_alone(self, trainer: Trainer, exception: Exception) -> None:
        if trainer.world_size > 1 and not trainer.strategy.replicates_state:
            _log.warning(
                "OnExceptionCheckpoint saves nothing after %s: with %s no process has the whole state",
                type(exception).__name__,
                type(trainer.strategy).__name__,
            )
            return
        path = self._path()
        rescue_checkpoint(trainer, path)
        self._note(trainer, path, exception, logs=True)

    def _path(self) -> str:
        return self._unused.choose(self.dirpath, self.filename)

    def _note(self, trainer: Trainer, path: str, exception: BaseException, *, logs: bool) -> None:
        wait_for_writes(trainer.strategy)
        self.ckpt_path = path
        if logs:
            _log.warning("%s after step %d: saved %s", type(exception).__name__, trainer.global_step, path)
