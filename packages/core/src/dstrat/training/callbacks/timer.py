"""Time of a training, and its limit."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from typing_extensions import override

from dstrat.errors import RequestError
from dstrat.training.arguments import read_duration
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.settings import Duration
    from dstrat.training.trainer import Trainer

TimedStage: TypeAlias = Literal["train", "validate", "test", "predict"]

_STAGES: tuple[TimedStage, ...] = ("train", "validate", "test", "predict")

_log = logging.getLogger(__name__)


class Timer(Callback):
    """Measure the time of training, validation, test and prediction, and stop training at a limit.

    The time of training includes its validations, and continues in a resumed run.  At the limit training stops on all
    ranks after the batch, or after the epoch, but not before ``min_epochs`` and ``min_steps``.

    Args:
        duration: Time limit of the training: ``"DD:HH:MM:SS"`` (days, hours, minutes, seconds), ``"HH:MM:SS"``, a
            ``timedelta``, or a dict of its arguments such as ``{"hours": 6}``; None only measures.
        interval: Whether to check the time after every ``"step"`` or after every ``"epoch"``.
        verbose: Whether to log a line at the limit.

    Raises:
        RequestError: The duration cannot be read or is not positive, or the interval is another.
    """

    retired_members: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("start_time", "end_time"), "time_elapsed(stage) has the time of all runs of a stage"
    )

    def __init__(
        self, duration: Duration | None = None, interval: Literal["step", "epoch"] = "step", verbose: bool = True
    ) -> None:
        if interval not in ("step", "epoch"):
            raise RequestError(f"interval={interval!r} must be 'step' or 'epoch'")
        self.duration = None if duration is None else read_duration(duration, "duration")
        self.interval = interval
        self.verbose = verbose
        self._began: dict[TimedStage, float | None] = dict.fromkeys(_STAGES)
        self._spent: dict[TimedStage, float] = dict.fromkeys(_STAGES, 0.0)
        self._deadline = self._deadline_of_steps = math.inf

    def time_elapsed(self, stage: TimedStage = "train") -> float:
        """Return the elapsed time of a stage in seconds."""
        began = self._began[_check_stage(stage)]
        return self._spent[stage] + (0.0 if began is None else monotonic() - began)

    def time_remaining(self, stage: TimedStage = "train") -> float | None:
        """Return the remaining time of a stage in seconds, at least 0; None without a limit."""
        if self.duration is None:
            return None
        return max(0.0, self.duration.total_seconds() - self.time_elapsed(stage))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"time_elapsed": {stage: self.time_elapsed(stage) for stage in _STAGES}}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._began = dict.fromkeys(_STAGES)
        self._spent = {stage: state_dict["time_elapsed"][stage] for stage in _STAGES}

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        for each in _STAGES if stage == "fit" else (_check_stage(stage),):  # a fit validates too
            self._began[each], self._spent[each] = None, 0.0

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        for each in _STAGES:  # also one that an exception has ended
            self._end(each)

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("train")
        remaining = self.time_remaining()
        self._deadline = math.inf if remaining is None else monotonic() + remaining
        self._deadline_of_steps = self._deadline if self.interval == "step" else math.inf
        if remaining == 0:  # of a resumed run, which would train a batch otherwise
            self._stop(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if monotonic() >= self._deadline_of_steps:
            self._stop(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if monotonic() >= self._deadline:
            self._stop(trainer)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("train")

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("validate")

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("validate")

    @override
    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("test")

    @override
    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("test")

    @override
    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._begin("predict")

    @override
    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end("predict")

    def _begin(self, stage: TimedStage) -> None:
        self._began[stage] = monotonic()

    def _end(self, stage: TimedStage) -> None:
        self._spent[stage] = self.time_elapsed(stage)
        self._began[stage] = None

    def _stop(self, trainer: Trainer) -> None:
        self._deadline = self._deadline_of_steps = math.inf  # once is enough
        trainer.should_stop = True
        if self.verbose and trainer.is_global_zero:
            _log.warning(
                "training ends after step %d, as it has taken %s of the %s that it may take",
                trainer.global_step,
                timedelta(seconds=round(self.time_elapsed())),
                self.duration,
            )


def _check_stage(stage: str) -> TimedStage:
    for each in _STAGES:
        if each == stage:
            return each
    raise RequestError(f"stage={stage!r} is not one of {', '.join(map(repr, _STAGES))}")
