"""Callback that saves checkpoints in the memory of the machine, from which a restarted job resumes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.strategy_state import unused_path
from dstrat.errors import CheckpointError, ConflictError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import EXTENSION
from dstrat.training.callbacks.save_schedule import BackgroundSaves, check_count
from dstrat.training.checkpoint.in_memory import folder_in_memory, is_in_memory, make_memory_root
from dstrat.training.checkpoint.path import default_folder, remove_checkpoint
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class InMemoryCheckpoint(Callback):
    """Save checkpoints every few steps in the memory of the machine, beside those on the disk.

    A rank that is killed, or an exception, then costs at most ``every_n_train_steps`` steps: ``max_restarts``,
    ``resume="auto"`` and ``ckpt_path="last"`` take the checkpoint with the most steps, in memory or on the disk.  Each
    rank copies its shard, and writes the copy in the background to ``/dev/shm``, which outlives all processes of the
    job, and not the machine.  A ModelCheckpoint still writes those that are to stay.

    The memory holds one complete checkpoint, and a second one while it is written.  It is freed when the fit completes;
    after a failure it stays until a run that was resumed from it, or from a later one on the disk, saves its next one.
    As with ``ModelCheckpoint(async_save=True)``, all saves of the run are in the background, one at a time.

    Args:
        every_n_train_steps: Number of optimizer steps between two saves.

    Attributes:
        dirpath: The folder of the ModelCheckpoint, to which one in memory belongs; set when a run starts.
        ckpt_path: The checkpoint in memory; empty before the first one, and after a completed fit.

    Raises:
        RequestError: The number of steps is not positive.
    """

    runs_last = True
    saves_checkpoints = True

    def __init__(self, every_n_train_steps: int) -> None:
        check_count("every_n_train_steps", every_n_train_steps, 1)
        self.every_n_train_steps = every_n_train_steps
        self.ckpt_path = ""
        self._superseded = ""  # by the checkpoint that has this state; removed once that is complete
        self.dirpath: CheckpointPath | None = None
        self._background: BackgroundSaves | None = None
        self._saved_at_step = 0
        self._is_complete = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"ckpt_path": self.ckpt_path, "superseded": self._superseded}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.ckpt_path, self._superseded = state_dict["ckpt_path"], state_dict["superseded"]

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.num_nodes > 1:
            raise ConflictError(
                f"InMemoryCheckpoint is for the ranks of one machine, and num_nodes={trainer.num_nodes}: each machine "
                "has its own memory.  Leave it out, or save to a disk of all machines, "
                "ModelCheckpoint(every_n_train_steps=..., async_save=True)"
            )
        on_disk = getattr(trainer.checkpoint_callback, "dirpath", None)
        self.dirpath = default_folder(trainer.run) if on_disk is None else as_path(on_disk)
        if stage == "fit":
            make_memory_root()
            self.ckpt_path, self._superseded, self._is_complete = "", "", False

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Before on_train_start, where a ModelCheckpoint looks whether saves are in the background.
        self._background = BackgroundSaves(trainer.strategy)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._saved_at_step = trainer.global_step
        # Those of the run that is resumed: the newest one is freed as if this run had saved it.  The one before it is
        # still there if a process was killed after a save was complete, and before the removal.
        paths = [self.ckpt_path, self._superseded]
        existing = [path for path in paths if path and is_in_memory(path) and Path(path).exists()]
        existing = trainer.strategy.broadcast(existing)
        self.ckpt_path = next((path for path in existing if path == self.ckpt_path), "")
        for path in existing:
            if path != self.ckpt_path:
                remove_checkpoint(trainer.strategy, path)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._background is not None  # noqa: S101 - on_fit_start comes first
        self._background.check()  # a failed write ends the run now, not at the next save
        # A batch may have several steps, and the batches before a step have none.
        if trainer.global_step // self.every_n_train_steps > self._saved_at_step // self.every_n_train_steps:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._is_complete = True

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        self._is_complete = False  # the last save to the disk may have failed
        if self._background is not None and isinstance(exception, Interrupted | Terminated):
            try:  # now, while the ranks can still communicate
                self._background.wait()
            except CheckpointError as error:
                _log.error("%s", error)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        background, self._background = self._background, None
        if background is None:
            return
        background.end()
        if self._is_complete and self.ckpt_path:
            path, self.ckpt_path = self.ckpt_path, ""
            remove_checkpoint(trainer.strategy, path)

    def _save(self, trainer: Trainer) -> None:
        assert self.dirpath is not None  # noqa: S101 - setup comes first
        self._saved_at_step = trainer.global_step
        previous, path = self.ckpt_path, folder_in_memory(self.dirpath) / f"step={trainer.global_step}{EXTENSION}"
        self.ckpt_path = str(unused_path(trainer.strategy, path))  # that of a failed run may be there
        self._superseded = previous
        trainer.save_checkpoint(self.ckpt_path)
        if previous:  # after this one is complete
            remove_checkpoint(trainer.strategy, previous)
