"""Saving checkpoints during training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import CheckpointName, not_logged, unused_path
from dstrat.training.callbacks.monitored import is_new, is_overdue
from dstrat.training.callbacks.ranking import Mode, Ranking
from dstrat.training.loggers.several import call_loggers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

DEFAULT_NAME = "epoch={epoch}-step={step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What rank 0 decided, for all ranks.

    Attributes:
        path: The file to write for the ranking, None where the score is not good enough.
        score: The monitored value, or the number of steps where nothing is monitored.
        last_path: The file to write as the last one, None where none is wanted.
        error: What is wrong with the request; every rank raises it.
    """

    path: str | None = None
    score: float = 0.0
    last_path: str | None = None
    error: str | None = None


class ModelCheckpoint(Callback):
    """Saves checkpoints at the end of epochs or after every so many steps, and keeps the best or the latest ones.

    A monitored value of validation is compared once per validation, and the checkpoint is written right after it or at
    the end of the epoch that it ends, so that the value belongs to the weights.  A value that is NaN is never the best.
    Files that others wrote are not touched: a name that is taken gets a suffix, ``-v1``.

    Args:
        dirpath: The folder; by default ``checkpoints`` in the run's log folder, or in ``default_root_dir`` without
            a logger.
        filename: A template without extension, such as ``"{epoch}-{val_loss:.3f}"``; ``epoch`` and ``step`` are known
            always.
        monitor: The logged value that ranks checkpoints; None ranks by age, the latest being the best.
        mode: Whether the smallest (``"min"``) or the largest (``"max"``) monitored value is the best.
        save_top_k: Number of checkpoints to keep; -1 keeps all, 0 none.
        save_last: Whether every save also replaces ``last.ckpt``.
        every_n_epochs: Save at the end of every n-th epoch.
        every_n_train_steps: Save after every so many optimizer steps, and not at the end of epochs.
        save_weights_only: Whether everything but the module's weights is left out.

    Attributes:
        dirpath: The folder; known when a fit has started.
        best_model_path: The best checkpoint, empty before the first.
        best_model_score: Its monitored value.
        last_model_path: The one that ``save_last`` wrote.

    Raises:
        RequestError: An argument is out of range.
    """

    runs_last = True
    saves_checkpoints = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        save_last: bool = False,
        every_n_epochs: int = 1,
        every_n_train_steps: int | None = None,
        save_weights_only: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise RequestError(f"mode={mode!r} must be 'min' or 'max'")
        _check_count("save_top_k", save_top_k, -1)
        _check_count("every_n_epochs", every_n_epochs, 1)
        if every_n_train_steps is not None:
            _check_count("every_n_train_steps", every_n_train_steps, 1)
        self._given_dirpath = None if dirpath is None else Path(dirpath).absolute()
        self.dirpath = self._given_dirpath
        self._name = CheckpointName(DEFAULT_NAME if filename is None else filename)
        self.monitor, self.mode = monitor, mode
        self.save_top_k, self.save_last, self.save_weights_only = save_top_k, save_last, save_weights_only
        self.every_n_epochs, self.every_n_train_steps = every_n_epochs, every_n_train_steps
        self._is_running = False
        self._begin()

    def _begin(self) -> None:
        self._ranking = Ranking(self.save_top_k, self.mode if self.monitor else "max")
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""
        self._is_due = False
        self._is_in_epoch = False
        self._seen_step = 0
        self._comes_from_validation = False
        self._validated_at_step = -1

    @property
    @override
    def state_key(self) -> str:
        when = f"every_n_epochs={self.every_n_epochs}, every_n_train_steps={self.every_n_train_steps}"
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r}, {when})"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": "" if self.dirpath is None else str(self.dirpath),
            "scores": self._ranking.scores,
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "last_model_path": self.last_model_path,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back the state; files in the folder of another run are remembered as best, but not removed any more."""
        self.best_model_path = state_dict["best_model_path"]
        self.best_model_score = state_dict["best_model_score"]
        if not self._is_running:  # the state is what a run in other processes has come to
            self.dirpath = Path(state_dict["dirpath"])
        if str(self.dirpath) == state_dict["dirpath"]:
            self._ranking.restore(state_dict["scores"])
            self.last_model_path = state_dict["last_model_path"]

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._begin()
            root = trainer.log_dir or trainer.default_root_dir
            self.dirpath = self._given_dirpath or root.absolute() / "checkpoints"
            self._is_running = True

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._is_running = False

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._seen_step = trainer.global_step

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
        interval = self.every_n_train_steps
        if interval is None:
            return
        step, seen = trainer.global_step, self._seen_step
        self._seen_step = step
        if step // interval != seen // interval:  # a batch may take several steps in manual optimization
            self._is_due = True
            self._save(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.is_fitting or trainer.sanity_checking:
            return
        if self.monitor is None or not is_new(self.monitor, trainer):
            return
        self._comes_from_validation = True
        self._validated_at_step = trainer.global_step
        if self.every_n_train_steps is None:
            ends_epoch = self._is_in_epoch and trainer.is_last_batch
            self._is_due = self._epoch_is_due(trainer) and not ends_epoch
        if self._is_due:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._is_in_epoch = False
        if self.every_n_train_steps is None:
            self._is_due = self._epoch_is_due(trainer)
        if self._is_due:
            self._save(trainer, must_be_known=is_overdue(trainer))
        if self.every_n_train_steps is None:
            self._is_due = False

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _save(self, trainer: Trainer, *, must_be_known: bool = False) -> None:
        """Save what is due, unless its monitored value is still to come; collective."""
        decision: Decision | None = trainer.strategy.broadcast(
            self._decide(trainer, must_be_known=must_be_known) if trainer.is_global_zero else None
        )
        if decision is None:
            return
        if decision.error is not None:
            raise MisuseError(decision.error)
        self._is_due = False
        driven_out = self._record(decision)  # first, so that the checkpoint knows itself
        for path in (decision.path, decision.last_path):
            if path is not None:
                trainer.save_checkpoint(path, weights_only=self.save_weights_only)
        for path in driven_out:
            trainer.strategy.remove_checkpoint(path)
        call_loggers(trainer.loggers, "after_save_checkpoint", self)

    def _decide(self, trainer: Trainer, *, must_be_known: bool) -> Decision | None:
        """Return what to save; None where the monitored value is still to come."""
        values: dict[str, Any] = {
            **trainer.callback_metrics,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        if self.monitor is not None and self.monitor not in values:
            problem = (
                f"ModelCheckpoint(monitor={self.monitor!r}) waits for a value {not_logged(trainer.callback_metrics)}"
            )
            return Decision(error=problem) if must_be_known else None
        if self._comes_from_validation and self._validated_at_step != trainer.global_step:
            return None
        score = float(values["step" if self.monitor is None else self.monitor])
        try:
            return Decision(path=self._path_for(score, values), score=score, last_path=self._last_path())
        except MisuseError as error:
            return Decision(error=str(error))

    def _path_for(self, score: float, values: Mapping[str, Any]) -> str | None:
        if not self._ranking.accepts(score):
            return None
        assert self.dirpath is not None  # noqa: S101 - setup has set it
        return unused_path(self.dirpath, self._name.fill(values), self._ranking.replaceable)

    def _last_path(self) -> str | None:
        if not self.save_last:
            return None
        assert self.dirpath is not None  # noqa: S101 - setup has set it
        return self.last_model_path or unused_path(self.dirpath, "last", None)

    def _record(self, decision: Decision) -> list[str]:
        """Take a decision into the state, and return the paths that are no longer kept."""
        self.last_model_path = decision.last_path or self.last_model_path
        if decision.path is None:
            return []
        if self.monitor is None:
            self.best_model_path = decision.path
        elif self._ranking.is_better(decision.score, than=self.best_model_score):
            self.best_model_path, self.best_model_score = decision.path, decision.score
        return self._ranking.add(decision.path, decision.score)


def _check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name}={value!r} must be an int of at least {least}")
