"""Callback that saves checkpoints during training."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.format import LAST
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.data.limits import check_count
from dstrat.errors import CheckpointError, MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import EXTENSION, CheckpointName, not_logged
from dstrat.training.callbacks.checkpoint_ranking import Decision, RetainedCheckpoints, SaveLast
from dstrat.training.callbacks.monitored import as_tensor, is_overdue, new_value
from dstrat.training.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from dstrat.training.callbacks.save_schedule import BackgroundSaves, SavingTimes
from dstrat.training.checkpoint.path import check_writable, default_folder, remove_checkpoint
from dstrat.training.loggers.defaults import call_loggers
from dstrat.training.loops.stopping import Interrupted, Terminated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.training.callbacks.monitored import Mode
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.settings import Duration
    from dstrat.training.trainer import Trainer

DEFAULT_NAME = "{epoch}-{step}"

_TEMPLATE = "write the whole name, such as ModelCheckpoint(filename='{epoch}_{step}', auto_insert_metric_name=False)"
_FIXED = {
    "CHECKPOINT_JOIN_CHAR": ("-", _TEMPLATE),
    "CHECKPOINT_EQUALS_CHAR": ("=", _TEMPLATE),
    "CHECKPOINT_NAME_LAST": (LAST, "read last_model_path, or pass ckpt_path='last', which find the last checkpoint"),
    "FILE_EXTENSION": (EXTENSION, f"the extension of checkpoints is {EXTENSION!r}, by which they are found"),
    "STARTING_VERSION": (1, "the first suffix of a used name is -v1"),
}
"""Parts of names that Lightning's users change, with their value and the advice about a change."""

_log = logging.getLogger(__name__)


class ModelCheckpoint(Callback):
    """Save checkpoints at the end of epochs, or every n steps or minutes, and retain the best or latest ones.

    A monitored value of validation is compared once per validation, and the checkpoint is written right after it, or at
    the end of the epoch that it ends, so that the value belongs to the weights.  NaN is never the best value.  Files of
    other runs are never overwritten: a used name gets a suffix, ``-v1``.  The checkpoint from which the run was resumed
    is never removed.  A failed save raises an error; the earlier checkpoints, and the state of the callback, are those
    before the save.

    Args:
        dirpath: The folder, or its URL in a store that fsspec supports (``"s3://bucket/folder"``); by default
            ``checkpoints`` in the run's log folder, or in ``default_root_dir`` without a logger or if that is a URL.
        filename: A template without extension, such as ``"{epoch}-{val_loss:.3f}"``, which gives
            ``epoch=3-val_loss=0.250``, with ``epoch``, ``step`` and logged names.
        monitor: The logged value that ranks checkpoints; None ranks by age, with the latest as the best.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) monitored value is the best.
        save_top_k: Number of checkpoints to retain; -1 is all, 0 none.
        save_last: Whether to retain the last checkpoint too, including one at the end of training after the last save.
            A single file overwrites ``last.ckpt``.  A folder has a name of its own, unless it is among the best, and
            the previous last one is removed after it is complete; ``last_model_path`` and ``ckpt_path="last"`` find it.
            ``"link"`` saves no additional checkpoint: the last one is the newest of the retained ones.  For single
            files ``last.ckpt`` is a link to it; folders always have the pointer ``last``.
        every_n_epochs: Save at the end of every n-th epoch; by default of every epoch.
        every_n_train_steps: Save after every n-th optimizer step, not at the end of epochs.
        train_time_interval: Save when this time has elapsed, at the end of a step, not at the end of epochs:
            ``"DD:HH:MM:SS"``, a timedelta, or a dict such as ``{"minutes": 30}``.
        save_on_train_epoch_end: True saves at the end of an epoch's training, False after its validation; None saves
            after a validation that logs the monitored value, and otherwise at the end of the training.
        save_weights_only: Whether checkpoints have the module's weights only.
        save_on_exception: Whether an exception, Ctrl-C or SIGTERM saves ``on_exception.ckpt``, like
            ``OnExceptionCheckpoint``.
        async_save: Whether to write checkpoints in the background, from a copy.  At most one save is in flight; its
            error is raised at a later step, and the end of the fit waits for it.  This applies to all saves of the run.
        verbose: Whether to log each save, with the monitored value.
        auto_insert_metric_name: Whether ``name=`` is inserted before each value of the template: ``"{epoch}"`` is
            ``epoch=3``, not ``3``.
        enable_version_counter: Must be True, since checkpoints are never overwritten.
        state_key: Key of the callback's state in checkpoints; by default made of ``monitor``, ``mode`` and the
            intervals.  Two callbacks that have these in common need different keys.

    Attributes:
        dirpath: The folder; set when a fit starts.

    Raises:
        RequestError: An argument is out of range.
        ConflictError: Two arguments determine the time of a save.
    """

    runs_last = True
    saves_checkpoints = True
    retired_arguments: ClassVar[Mapping[str, str]] = {
        "period": "it is every_n_epochs",
        "every_n_val_epochs": "it is every_n_epochs",
        "prefix": "write it into the template, filename='prefix-{epoch}'",
        "filepath": "it is dirpath and filename",
        # Near to every_n_train_steps, which saves to the disk.
        "in_memory_every_n_steps": "it is InMemoryCheckpoint(every_n_train_steps=...)",
    }
    retired_members: ClassVar[Mapping[str, str]] = {
        "check_monitor_top_k": "best_k_models has the checkpoints that are kept",
        "file_exists": "a save never overwrites a checkpoint",
        "kth_value": "best_k_models[kth_best_model_path] has it",
        "to_yaml": "write best_k_models, which has paths and values",
    }
    # Lightning's names of parts that are fixed here: programs read them, and a change is an error.
    CHECKPOINT_JOIN_CHAR, CHECKPOINT_EQUALS_CHAR, STARTING_VERSION = "-", "=", 1
    CHECKPOINT_NAME_LAST, FILE_EXTENSION = LAST, EXTENSION

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: SaveLast | None = False,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: Duration | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        async_save: bool = False,
        state_key: str | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise RequestError(f"mode={mode!r} must be 'min' or 'max'")
        save_last = save_last or False  # Lightning's default is None
        if save_last not in (True, False, "link"):
            raise RequestError(f"save_last={save_last!r} must be True, False or 'link'")
        if enable_version_counter is not True:
            raise RequestError(
                f"enable_version_counter={enable_version_counter!r} would write over what another run has saved, which "
                "is never done: leave it out, or choose another dirpath or filename"
            )
        check_count(save_top_k, "save_top_k", -1)
        self._times = SavingTimes(every_n_epochs, every_n_train_steps, train_time_interval, save_on_train_epoch_end)
        self._requested_dirpath = None if dirpath is None else as_path(dirpath).absolute()
        self.dirpath = self._requested_dirpath
        template = DEFAULT_NAME if filename is None else filename
        self._name = CheckpointName(template, shows_names=auto_insert_metric_name)
        self.monitor, self.mode = monitor, mode
        self.save_top_k, self.save_last, self.save_weights_only = save_top_k, save_last, save_weights_only
        self.save_on_exception, self.async_save, self.verbose = save_on_exception, async_save, verbose
        self._state_key = state_key
        self._rescue: OnExceptionCheckpoint | None = None
        self._background: BackgroundSaves | None = None
        self._is_running = self._is_evaluating = False
        self._saved_at_step = 0
        self._begin()

    def _begin(self) -> None:
        self._retained = RetainedCheckpoints(
            limit=self.save_top_k,
            mode=self.mode if self.monitor else "max",
            is_monitored=self.monitor is not None,
            save_last=self.save_last,
        )
        self._is_fresh = True
        self._is_due = False
        self._is_in_epoch = False
        self._comes_from_validation = False
        self._validated_at_step = -1
        self._validation_score: float | None = None
        self._ranked_at_step = 0
        self._is_unannounced = False
        self._saved_paths: list[str] = []
        self._saved_for = ""
        self._evicted: list[str] = []
        self._pending_removals: list[str] = []
        self._safe_state: dict[str, Any] | None = None  # before a save that has not succeeded yet
        self._current_score: float | None = None

    @property
    def filename(self) -> str:
        """The template of names."""
        return self._name.template

    @property
    def every_n_epochs(self) -> int:
        """Number of epochs between saves; 0 if steps or time determine them."""
        return self._times.every_n_epochs if self._times.counts_epochs else 0

    @property
    def every_n_train_steps(self) -> int:
        """Number of optimizer steps between saves; 0 if epochs or time determine them."""
        return self._times.every_n_train_steps or 0

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; empty before the first one."""
        return self._retained.best_path

    @property
    def best_model_score(self) -> Tensor | None:
        """The best monitored value, a 0-dim tensor on the CPU; None before the first one, or without a monitor."""
        return None if self._retained.best_score is None else as_tensor(self._retained.best_score)

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The checkpoints retained by ``save_top_k``, with their monitored value, or their number of steps."""
        return {path: as_tensor(score) for path, score in self._retained.scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The checkpoint that the next better one evicts; empty while the limit is not reached."""
        return self._retained.next_to_go

    @property
    def current_score(self) -> Tensor | None:
        """The latest monitored value, also if it was not good enough for a save."""
        return None if self._current_score is None else as_tensor(self._current_score)

    @property
    def last_model_path(self) -> str:
        """The last checkpoint, retained by ``save_last``."""
        return self._retained.link or self._retained.last_path

    @property
    def saved_paths(self) -> list[str]:
        """The paths written by the latest save of this run; empty if there were none."""
        return list(self._saved_paths)

    @property
    def ckpt_path(self) -> str:
        """The checkpoint of ``save_on_exception``; empty without one."""
        return "" if self._rescue is None else self._rescue.ckpt_path

    @property
    @override
    def state_key(self) -> str:
        if self._state_key is not None:
            return self._state_key
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r}, {self._times.describe()})"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": "" if self.dirpath is None else str(self.dirpath),
            "current_score": self._current_score,
            "ranked_at_step": self._ranked_at_step,
            "comes_from_validation": self._comes_from_validation,
            "validated_at_step": self._validated_at_step,
            "validation_score": self._validation_score,
            "is_due": self._is_due,
            "driven_out": list(self._evicted),
            **self._retained.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state; of checkpoints in the folder of another run only the best one, which is never removed."""
        if self._is_evaluating and self.best_model_path:
            return  # the evaluated checkpoint has an older state than the callback
        self._begin()
        self._is_fresh = False
        if not self._is_running:  # the state of ranks in other processes, after their run
            self.dirpath = as_path(state_dict["dirpath"])
        # Checkpoints of older versions have only some of these.
        self._current_score = state_dict.get("current_score")
        self._ranked_at_step = state_dict.get("ranked_at_step", 0)
        self._comes_from_validation = state_dict.get("comes_from_validation", False)
        self._validated_at_step = state_dict.get("validated_at_step", -1)
        self._validation_score = state_dict.get("validation_score")
        self._is_due = state_dict.get("is_due", False)
        in_same_folder = str(self.dirpath) == state_dict["dirpath"]
        self._retained.load_state_dict(state_dict, in_same_folder=in_same_folder)
        self._pending_removals = list(state_dict.get("driven_out", ())) if in_same_folder else []

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint from the template.

        Args:
            metrics: Values for the template, including ``epoch`` and ``step``.
            filename: Another template.
            ver: Number of the suffix ``-v1``, ``-v2`` ...

        Raises:
            MisuseError: The template has a name that is not among the values.
        """
        name = self._name if filename is None else CheckpointName(filename, shows_names=self._name.shows_names)
        suffix = "" if ver is None else f"-v{ver}"
        path = f"{name.fill(metrics)}{suffix}{EXTENSION}"
        return path if self.dirpath is None else str(self.dirpath / path)

    # The run

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._is_evaluating = stage != "fit"
        if self._is_evaluating:
            return
        _check_constants(self)
        self.dirpath = self._requested_dirpath or default_folder(trainer.run)
        self._check_link(trainer, self.dirpath)
        # Before training, not at the first save, which may be hours away.
        if trainer.is_global_zero and (self.save_top_k or self.save_last):
            # A template may have folders; of those with values only the name in the file is known then.
            folder = self.dirpath / self.filename.partition("{")[0].rpartition("/")[0]
            check_writable(folder, trainer.strategy.checkpoint_io)
        self._is_running = self._is_fresh = True
        self._rescue = OnExceptionCheckpoint(self.dirpath) if self._rescued_exceptions(trainer) else None

    def _rescued_exceptions(self, trainer: Trainer) -> tuple[type[BaseException], ...]:
        """Return the exceptions on which a checkpoint is saved: of a preemption, if no other callback does that."""
        if self.save_on_exception:
            return (BaseException,)
        is_saved_anyway = any(
            isinstance(callback, OnExceptionCheckpoint) or getattr(callback, "save_on_exception", False)
            for callback in trainer.callbacks
        )
        is_first = trainer.checkpoint_callback is self
        return (Terminated,) if trainer.preemption_deadline and is_first and not is_saved_anyway else ()

    def _check_link(self, trainer: Trainer, folder: CheckpointPath) -> None:
        is_single_file = not trainer.strategy.checkpoint_io.is_collective
        if self.save_last == "link" and is_single_file and not storage_of(folder).is_local:
            raise MisuseError(
                f"ModelCheckpoint(save_last='link') links to single files, and {str(folder)!r} is in a store, "
                "which has no links: pass save_last=True, or save portable folders"
            )

    @override
    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        # A new run starts without a ranking, unless its state was loaded from a checkpoint.  Not in setup, which comes
        # before the checkpoint is resolved: ckpt_path="best" reads the ranking of the last run.
        if self._is_fresh:
            self._begin()
        self._background = BackgroundSaves(trainer.strategy) if self.async_save else None

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO) and self._background is None:
            self._background = BackgroundSaves(trainer.strategy)  # the user or another callback has made the io async
        self._times.begin(trainer.run)
        self._saved_at_step = trainer.global_step
        self._retained.resumed_from = _resumed_path(trainer)
        self._remove_pending(trainer)
        if self._rescue is not None:
            self._rescue.on_train_start(trainer, module)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._saved_at_step != trainer.global_step:  # at the start it is the step of the resumed checkpoint
            self._save_end(trainer)
        if self._background is not None:
            self._restore_on_failure(self._background.wait)
            self._announce_save(trainer)

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if self._background is not None and isinstance(exception, Interrupted | Terminated):
            try:  # now, while the ranks can still communicate
                self._restore_on_failure(self._background.wait)
            except CheckpointError as error:
                _log.error("%s", error)
        if self._rescue is not None and isinstance(exception, self._rescued_exceptions(trainer)):
            self._rescue.on_exception(trainer, module, exception)

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        background, self._background = self._background, None
        self._is_running = self._is_evaluating = False
        self._times.end()
        if background is not None:
            self._restore_on_failure(background.end)
            if self._is_unannounced:  # after an exception
                self._link(trainer)
        self._retained.unused.release()

    # Times of saves

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._is_in_epoch = True

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._background is not None:
            self._restore_on_failure(self._background.check)  # a failed write ends the run now, not at the next save
        if not self._times.counts_epochs and self._times.after_batch(trainer.run):
            self._is_due = True
            self._save(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        times = self._times
        if not trainer.is_fitting or trainer.sanity_checking or times.save_on_train_epoch_end:
            return
        score = None if self.monitor is None else new_value(self.monitor, trainer.run)
        if times.save_on_train_epoch_end is None and score is None:
            return
        self._validation_score = score
        self._comes_from_validation = True
        self._validated_at_step = trainer.global_step
        if times.counts_epochs:
            is_between = self._is_in_epoch and not trainer.is_last_batch
            # Batches that accumulate are no step since the last save, or since the start.
            is_stale = is_between and self._ranked_at_step == trainer.global_step
            # After the last validation of an epoch its end saves, with the values that are logged until then.
            saves_now = times.save_on_train_epoch_end is False or is_between or not self._is_in_epoch
            self._is_due = times.epoch_is_due(trainer.run) and saves_now and not is_stale
        if self._is_due:
            self._save(trainer, requires_value=times.save_on_train_epoch_end is False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._is_in_epoch = False
        times = self._times
        if times.counts_epochs:
            self._is_due = times.epoch_is_due(trainer.run) and times.save_on_train_epoch_end is not False
        if self._is_due:
            self._save(trainer, requires_value=is_overdue(trainer.run))
        if times.counts_epochs:  # a save by steps or time stays due until its value is logged
            self._is_due = False

    # Saving

    def _save(self, trainer: Trainer, *, requires_value: bool = False) -> None:
        """Save a checkpoint that is due, unless its monitored value is not logged yet; collective."""
        decision: Decision | None = trainer.strategy.broadcast(
            self._decide(trainer, requires_value=requires_value) if trainer.is_global_zero else None
        )
        if decision is None:
            return
        if decision.error is not None:  # of rank 0: raised on every rank, as the others would wait in the save
            raise MisuseError(decision.error)
        self._is_due = False
        self._current_score = None if self.monitor is None else decision.score
        self._restore_on_failure(partial(self._write, trainer, decision))
        if self._background is None:
            self._announce_save(trainer)

    def _save_end(self, trainer: Trainer) -> None:
        """Save the last checkpoint if training has ended between two saves; collective."""
        assert self.dirpath is not None  # noqa: S101 - setup has set it
        replaces = not trainer.strategy.checkpoint_io.is_collective
        decision: Decision = trainer.strategy.broadcast(
            self._retained.decide_last(self.dirpath, replaces=replaces) if trainer.is_global_zero else Decision()
        )
        if decision.paths:
            self._restore_on_failure(partial(self._write, trainer, decision))
            self._saved_for = ""
            if self._background is None:
                self._announce_save(trainer)

    def _write(self, trainer: Trainer, decision: Decision) -> None:
        if self._background is not None:
            self._background.wait()  # the state before this save must be that of a successful one
            self._announce_save(trainer)
        self._safe_state = self.state_dict()
        self._ranked_at_step = trainer.global_step
        self._evicted = self._retained.apply(decision, replaces=not trainer.strategy.checkpoint_io.is_collective)
        for path in decision.paths:
            trainer.save_checkpoint(path, weights_only=self.save_weights_only)
        if not self._retained.link:  # a link may still point to an evicted checkpoint, until _link moves it
            self._remove_evicted(trainer)
        self._saved_paths, self._is_unannounced = decision.paths, True
        if decision.last_path is not None:
            self._saved_at_step = trainer.global_step
        self._saved_for = "" if self.monitor is None else f": {self.monitor} = {decision.score:.6g}"
        if self._background is None:
            self._safe_state = None

    def _announce_save(self, trainer: Trainer) -> None:
        """Notify the loggers of a complete checkpoint, and update the link."""
        if self._is_unannounced:
            self._link(trainer)
            call_loggers(trainer.loggers, "after_save_checkpoint", self)
            if self.verbose and trainer.is_global_zero and self._saved_paths:
                _log.warning("saved %s%s", " and ".join(map(repr, self._saved_paths)), self._saved_for)

    def _link(self, trainer: Trainer) -> None:
        """Point the link to the complete checkpoint, and then remove evicted ones, among them its previous target."""
        self._is_unannounced = False
        if trainer.is_global_zero:
            self._retained.update_link()
        self._retained.unused.release([*self._saved_paths, self._retained.link])
        self._remove_evicted(trainer)

    def _remove_evicted(self, trainer: Trainer) -> None:
        evicted, self._evicted = self._evicted, []
        for path in evicted:
            remove_checkpoint(trainer.strategy, path)

    def _remove_pending(self, trainer: Trainer) -> None:
        """Remove checkpoints that a killed run had evicted, but not yet removed; collective."""
        pending, self._pending_removals = self._pending_removals, []
        if pending:
            # Only older ones: without a newer checkpoint they are the last ones to resume from.
            old = self._retained.older_than_newest(pending) if trainer.is_global_zero else []
            for path in trainer.strategy.broadcast(old):
                remove_checkpoint(trainer.strategy, path)

    def _restore_on_failure(self, wait: Callable[[], None]) -> None:
        """Run a function that saves, or waits for a save; if it fails, restore the callback's state before the save."""
        try:
            wait()
        except BaseException as error:
            self._retained.unused.release()
            if isinstance(error, Exception) and self._safe_state is not None:
                self.load_state_dict(self._safe_state)
            raise

    def _decide(self, trainer: Trainer, *, requires_value: bool) -> Decision | None:
        """Return the decision about a save; None if the monitored value is not logged yet."""
        values: dict[str, Any] = {
            **trainer.callback_metrics,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        if self.monitor is not None and self.monitor not in values:
            problem = (
                f"ModelCheckpoint(monitor={self.monitor!r}) waits for a value {not_logged(trainer.callback_metrics)}"
            )
            return Decision(error=problem) if requires_value else None
        # A value of an earlier validation does not belong to the weights of this step.
        if self._comes_from_validation and self._validated_at_step != trainer.global_step:
            return None
        # Training may have logged the same name since.
        if self.monitor is not None and self._comes_from_validation and self._validation_score is not None:
            values[self.monitor] = self._validation_score
        score = float(values["step" if self.monitor is None else self.monitor])
        assert self.dirpath is not None  # noqa: S101 - setup has set it
        replaces = not trainer.strategy.checkpoint_io.is_collective
        try:
            return self._retained.decide(self.dirpath, self._name, values, score, replaces=replaces)
        except MisuseError as error:
            return Decision(error=str(error))


def _resumed_path(trainer: Trainer) -> str:
    """Return the local checkpoint from which a run was resumed; empty without one."""
    from dstrat.checkpoint.portable.newest import resolve

    if trainer.run.save_point is not None and trainer.run.save_point.checkpoint is not None:
        return ""  # saved by an earlier attempt of this fit
    if trainer.ckpt_path is None or not storage_of(as_path(trainer.ckpt_path)).is_local:
        return ""
    path = Path(trainer.ckpt_path).absolute()
    if path.is_symlink():  # a link of save_last="link", whose target changes with the next save
        return str(path.parent / path.readlink())
    return str(resolve(path) if path.name == LAST and not path.is_dir() else path)


def _check_constants(callback: ModelCheckpoint) -> None:
    """Raise a RequestError if a subclass or the user has changed a part of the names that is fixed."""
    for name, (fixed, advice) in _FIXED.items():
        value = getattr(callback, name)
        if value != fixed:
            raise RequestError(f"{type(callback).__name__}.{name} = {value!r} would have no effect: {advice}")
