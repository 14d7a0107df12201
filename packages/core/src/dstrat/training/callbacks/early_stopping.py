"""Early stopping by a logged value."""

from __future__ import annotations

import logging
import math
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.checkpoint_name import not_logged
from dstrat.training.callbacks.monitored import as_tensor, is_overdue, new_value, was_completed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dstrat.training.callbacks.monitored import Mode
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class EarlyStoppingReason(Enum):
    """Why a training was stopped by a value."""

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(Callback):
    """Stop training when a logged value no longer improves, or is out of bounds.

    A value of validation is checked after each validation, any other at the end of each epoch.  The value of rank 0
    decides for all ranks.

    Args:
        monitor: Name of the logged value.
        min_delta: Minimal change that counts as an improvement.
        patience: Number of consecutive checks without an improvement after which training stops.
        verbose: Whether to log each improvement too.
        mode: Whether smaller (``"min"``) or larger (``"max"``) values are better.
        strict: Whether it is an error that the value was not logged; otherwise that is a warning.
        check_finite: Whether training stops when the value is NaN or infinite.
        stopping_threshold: Training stops when the value is better than this.
        divergence_threshold: Training stops when the value is worse than this.
        check_on_train_epoch_end: True checks at the end of epochs only, False after validations only.
        log_rank_zero_only: Whether only rank 0 logs the reason of a stop; all ranks decide alike.
        state_key: Key of the callback's state in checkpoints; by default made of ``monitor`` and ``mode``.  Two
            callbacks with the same ``monitor`` and ``mode`` need different keys.

    Attributes:
        wait_count: Number of consecutive checks without an improvement.
        stopped_epoch: Index of the epoch in which training was stopped; 0 if it was not.
        stopping_reason: Why it was stopped; ``NOT_STOPPED`` if it was not.
        stopping_reason_message: The same as text, with the values; None if it was not stopped.

    Raises:
        RequestError: An argument is out of range.
    """

    runs_last = True
    retired_members: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mode_dict", "monitor_op", "order_dict"), "mode says which values are better"
    )

    def __init__(
        self,
        monitor: str,
        min_delta: float = 0.0,
        patience: int = 3,
        verbose: bool = False,
        mode: Mode = "min",
        strict: bool = True,
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        log_rank_zero_only: bool = True,
        state_key: str | None = None,
    ) -> None:
        if mode not in ("min", "max"):
            raise RequestError(f"mode={mode!r} must be 'min' or 'max'")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
            raise RequestError(f"patience={patience!r} must be an int of at least 0")
        if min_delta < 0:
            raise RequestError(f"min_delta={min_delta!r} must not be negative: it is the size of an improvement")
        self.monitor, self.mode = monitor, mode
        self.min_delta, self.patience = min_delta, patience
        self.verbose, self.strict, self.check_finite = verbose, strict, check_finite
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self.check_on_train_epoch_end = check_on_train_epoch_end
        self.log_rank_zero_only = log_rank_zero_only
        self._state_key = state_key
        self._begin()

    def _begin(self) -> None:
        self._best_score: float | None = None
        self.wait_count = 0
        self.stopped_epoch = 0
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None
        self._comes_from_validation = False
        self._has_warned = False

    @property
    def best_score(self) -> Tensor | None:
        """The best value until now, a 0-dim tensor on the CPU; None before the first one."""
        return None if self._best_score is None else as_tensor(self._best_score)

    @property
    @override
    def state_key(self) -> str:
        if self._state_key is not None:
            return self._state_key
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r})"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "best_score": self._best_score,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
            "comes_from_validation": self._comes_from_validation,
        }

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._best_score = state_dict["best_score"]
        self.wait_count = state_dict["wait_count"]
        self.stopped_epoch = state_dict["stopped_epoch"]
        # Checkpoints of older versions have the message as the reason, or none of these.
        reason = state_dict.get("stopping_reason")
        self.stopping_reason = EarlyStoppingReason(reason if isinstance(reason, int) else 0)
        self.stopping_reason_message = state_dict.get("stopping_reason_message")
        self._comes_from_validation = state_dict.get("comes_from_validation", False)

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._begin()

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.is_fitting or trainer.sanity_checking or self.check_on_train_epoch_end is True:
            return
        # With False the value must come from validation, and it is an error in _check if it does not.
        if self.check_on_train_epoch_end is False or new_value(self.monitor, trainer.run) is not None:
            self._comes_from_validation = True
            self._check(trainer, requires_value=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        is_due = self.check_on_train_epoch_end is not False and not self._comes_from_validation
        # Values of an incomplete epoch cannot be compared with those of others.
        if is_due and was_completed(trainer.run):
            self._check(trainer, requires_value=is_overdue(trainer.run))

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._best_score is None and self.wait_count == 0:
            self._log_warning(
                trainer, f"EarlyStopping(monitor={self.monitor!r}) had no value to check in this training"
            )

    def _check(self, trainer: Trainer, *, requires_value: bool) -> None:
        """Check the value, and stop training if necessary; collective."""
        # Of rank 0: values without sync_dist differ between ranks, and all must stop alike.
        value = trainer.callback_metrics.get(self.monitor) if trainer.is_global_zero else None
        score: float | None = trainer.strategy.broadcast(None if value is None else float(value))
        if score is None:
            if requires_value:
                self._miss(trainer)
        elif not trainer.fast_dev_run:  # which has too few values to judge, and must leave should_stop alone
            self._judge(trainer, score)

    def _judge(self, trainer: Trainer, score: float) -> None:
        before = self._best_score
        if self._is_better(score, than=before):
            self._best_score, self.wait_count = score, 0
        else:
            self.wait_count += 1
        self.stopping_reason, message = self._reason_to_stop(score)
        self.stopping_reason_message = message or None
        if self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED:
            trainer.should_stop = True
            self.stopped_epoch = trainer.current_epoch
            self._log_warning(trainer, f"training ends after step {trainer.global_step}: {message}")
        elif self.verbose and self.wait_count == 0:
            was = "" if before is None else f", was {before:.6g}"
            self._log_warning(trainer, f"{self.monitor} = {score:.6g} is the best so far{was}")

    def _is_better(self, score: float, *, than: float | None) -> bool:
        if than is None:
            return not math.isnan(score)
        gain = than - score if self.mode == "min" else score - than
        return gain > self.min_delta

    def _reason_to_stop(self, score: float) -> tuple[EarlyStoppingReason, str]:
        """Return the reason to stop, and its text with the values."""
        shown, better = f"{self.monitor} = {score:.6g}", "below" if self.mode == "min" else "above"
        worse = "above" if self.mode == "min" else "below"
        if self.check_finite and not math.isfinite(score):
            return EarlyStoppingReason.NON_FINITE_METRIC, f"{shown} is not finite"
        if self.stopping_threshold is not None and self._is_beyond(score, self.stopping_threshold):
            message = f"{shown} is {better} stopping_threshold={self.stopping_threshold!r}"
            return EarlyStoppingReason.STOPPING_THRESHOLD, message
        if self.divergence_threshold is not None and self._is_beyond(-score, -self.divergence_threshold):
            message = f"{shown} is {worse} divergence_threshold={self.divergence_threshold!r}"
            return EarlyStoppingReason.DIVERGENCE_THRESHOLD, message
        if self.wait_count >= max(1, self.patience):  # with patience=0 the first check without an improvement ends it
            best = "no number" if self._best_score is None else f"{self._best_score:.6g}"
            checks = "1 check" if self.wait_count == 1 else f"{self.wait_count} checks"
            by = f" by more than min_delta={self.min_delta!r}" if self.min_delta else ""
            return EarlyStoppingReason.PATIENCE_EXHAUSTED, f"{shown}, no better than {best}{by} in {checks}"
        return EarlyStoppingReason.NOT_STOPPED, ""

    def _is_beyond(self, score: float, threshold: float) -> bool:
        return score < threshold if self.mode == "min" else score > threshold

    def _miss(self, trainer: Trainer) -> None:
        available = trainer.strategy.broadcast(not_logged(trainer.callback_metrics) if trainer.is_global_zero else "")
        problem = f"EarlyStopping(monitor={self.monitor!r}) waits for a value {available}"
        if self.strict:
            raise MisuseError(problem)
        if not self._has_warned:
            self._log_warning(trainer, problem)
            self._has_warned = True

    def _log_warning(self, trainer: Trainer, line: str) -> None:
        # Python shows warnings, but no infos, of a program that has not configured logging.
        if trainer.is_global_zero:
            _log.warning(line)
        elif not self.log_rank_zero_only:
            _log.warning("[rank %d] %s", trainer.global_rank, line)
