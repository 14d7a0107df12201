"""Callback that saves checkpoints in the memory of the machines, from which a restarted job resumes."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from dstrat.checkpoint.formats import io_for, portable_io
from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.memory_files import (
    MEMORY_VARIABLE,
    JobFolder,
    attempts_in_memory,
    folder_in_memory,
    is_in_memory,
    job_folder_name,
    make_memory_root,
    memory_root,
)
from dstrat.data.limits import check_count
from dstrat.errors import CheckpointError, ConflictError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import EXTENSION
from dstrat.training.callbacks.save_schedule import BackgroundSaves
from dstrat.training.checkpoint.path import default_folder, job_id_of
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class InMemoryCheckpoint(Callback):
    """Save checkpoints every few steps in the memory of the machines, beside those on the disk.

    A rank that is killed, or an exception, then costs at most ``every_n_train_steps`` steps: ``max_restarts``,
    ``resume="auto"`` and ``ckpt_path="last"`` take the checkpoint with the most steps, in memory or on the disk.  Each
    rank copies its shard, and writes the copy in the background to ``/dev/shm``, which outlives all processes of the
    job, and not the machine.  With several machines, each also sends its shards to the next one, so that a machine may
    be lost.  A ModelCheckpoint still writes those that are to stay.

    The memory holds two checkpoints: a complete one, and the one before it, whose memory the next one takes.  It is
    freed when the fit completes; after a failure the complete one stays until a run that was resumed from it, or from a
    later one on the disk, saves its next one.  Each job has a folder of its own, and no other job resumes from it while
    this one runs.  As with ``ModelCheckpoint(async_save=True)``, all saves of the run are in the background, one at a
    time.

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
    saves_in_memory = True

    def __init__(self, every_n_train_steps: int) -> None:
        check_count(every_n_train_steps, "every_n_train_steps", 1)
        self.every_n_train_steps = every_n_train_steps
        self.ckpt_path = ""
        self._superseded = ""  # by the checkpoint that has this state; removed once that is complete
        self.dirpath: CheckpointPath | None = None
        self._job: JobFolder | None = None
        self._background: BackgroundSaves | None = None
        self._saved_at_step = 0
        self._copies_are_due = False
        self._is_complete = False

    @override
    def state_dict(self) -> dict[str, Any]:
        # Below the root, which another machine may have at another path.
        names = {"ckpt_path": self.ckpt_path, "superseded": self._superseded}
        return {key: path and str(Path(path).relative_to(memory_root())) for key, path in names.items()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        paths = [str(memory_root() / state_dict[key]) for key in ("ckpt_path", "superseded")]
        # Without a name it is the root; of another root, which the machine had before, nothing is known.
        paths = [path if is_in_memory(path) and Path(path) != memory_root() else "" for path in paths]
        self.ckpt_path, self._superseded = paths

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit" and trainer.num_nodes > 1:
            _check_sends_to_machines(trainer)
        on_disk = getattr(trainer.checkpoint_callback, "dirpath", None)
        self.dirpath = default_folder(trainer.run) if on_disk is None else as_path(on_disk)
        if stage == "fit":
            make_memory_root()
            self.ckpt_path, self._superseded, self._is_complete = "", "", False

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # Before on_train_start, where a ModelCheckpoint looks whether saves are in the background.
        self._background = BackgroundSaves(trainer.strategy)
        io = portable_io(trainer.strategy.checkpoint_io)
        if trainer.num_nodes > 1 and io is not None and io.machines(io.ranks()).count == 1 and trainer.is_global_zero:
            _log.warning(
                "all ranks of num_nodes=%d write to one memory, so InMemoryCheckpoint makes no copies: if these are "
                "several machines, set %s to a folder of its own on each",
                trainer.num_nodes,
                MEMORY_VARIABLE,
            )

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._saved_at_step = trainer.global_step
        assert self.dirpath is not None  # noqa: S101 - setup comes first
        strategy = trainer.strategy
        # The one of the run that is resumed is freed as if this run had saved it.  Others are still there if a process
        # was killed after a save was complete, and before the removal, or if not all machines had it.
        folders = attempts_in_memory(self.dirpath, job_id_of(strategy))
        if self.ckpt_path:
            folders.append(Path(self.ckpt_path).parent)
        for path in (self._superseded, *(str(path) for folder in folders for path in folder.glob(f"*{EXTENSION}"))):
            if path and path != self.ckpt_path:
                _remove(strategy, path)
        if self.ckpt_path and not strategy.reduce_boolean_decision(Path(self.ckpt_path).exists(), all=False):
            self.ckpt_path = ""
        # After the first step: a machine that has replaced another one has no copies, and a second one may be lost.
        self._copies_are_due = bool(self.ckpt_path) and trainer.num_nodes > 1

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._background is not None  # noqa: S101 - on_fit_start comes first
        self._background.check()  # a failed write ends the run now, not at the next save
        # A batch may have several steps, and the batches before a step have none.
        every, step = self.every_n_train_steps, trainer.global_step
        if step // every > self._saved_at_step // every or (self._copies_are_due and step > self._saved_at_step):
            self._copies_are_due = False
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
        job, self._job = self._job, None
        if background is None:
            return
        try:
            background.end()
            if self._is_complete and self.ckpt_path:
                path, self.ckpt_path = self.ckpt_path, ""
                _remove(trainer.strategy, path)
        finally:
            if job is not None:
                job.release(removes=self._is_complete)

    def save_now(self, trainer: Trainer) -> None:
        """Save a checkpoint after an optimizer step, and wait until it is complete; collective.

        Raises:
            CheckpointError: It cannot be written.
        """
        assert self._background is not None  # noqa: S101 - called in a fit
        if not self.ckpt_path or trainer.global_step != self._saved_at_step:
            self._save(trainer)
        self._background.wait()

    def _save(self, trainer: Trainer) -> None:
        assert self.dirpath is not None  # noqa: S101 - setup comes first
        self._saved_at_step = trainer.global_step
        if self._job is None:
            name = job_folder_name(job_id_of(trainer.strategy), trainer.strategy.broadcast(secrets.token_hex(4)))
            self._job = JobFolder(folder_in_memory(self.dirpath) / name)
        previous, self._superseded = self.ckpt_path, self.ckpt_path
        self.ckpt_path = str(self._job.path / f"step={trainer.global_step}{EXTENSION}")
        trainer.save_checkpoint(self.ckpt_path)
        if previous:  # after this one is complete
            _remove(trainer.strategy, previous)


def _check_sends_to_machines(trainer: Trainer) -> None:
    io = portable_io(trainer.strategy.checkpoint_io)
    if io is None:
        format_name = type(trainer.strategy.checkpoint_io.file_io).__name__
        problem, advice = f"checkpoints of {format_name} cannot be divided among machines", "use portable ones"
    elif not io.ranks().sends_to_ranks:
        problem, advice = f"{type(trainer.strategy).__name__} has no process group to send them with", "leave it out"
    else:
        return
    raise ConflictError(
        f"InMemoryCheckpoint with num_nodes={trainer.num_nodes} sends shards to another machine, and {problem}: "
        f"{advice}, or save to a disk of all machines, ModelCheckpoint(every_n_train_steps=..., async_save=True)"
    )


def _remove(strategy: Strategy, path: str) -> None:
    """Remove a checkpoint in memory, on every machine."""
    if is_in_memory(path) and strategy.local_rank == 0:
        io_for(path, strategy.checkpoint_io).remove_checkpoint(path)
