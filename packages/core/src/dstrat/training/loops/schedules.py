"""Schedules of a fit: learning-rate schedulers and validation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from dstrat.data.limits import limit_of
from dstrat.errors import MisuseError
from dstrat.training.arguments import read_duration
from dstrat.training.hooks import hook_of
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.optimizers import SchedulerConfig
    from dstrat.training.run import Run


class SchedulerSteps:
    """The steps of learning-rate schedulers in automatic optimization; in manual optimization the module steps them.

    Schedulers that monitor a value are stepped after validation, which may log the value.

    Args:
        run: Has the schedulers, the logged values, and the module with the hook that steps a scheduler.

    Attributes:
        step_with_batches: Whether any scheduler is stepped within epochs.
    """

    def __init__(self, run: Run) -> None:
        self._run, module = run, run.module
        self._step_one = hook_of(module, "lr_scheduler_step", TrainModule)
        configs = run.strategy.lr_schedulers if module.automatic_optimization else []
        of_steps = [config for config in configs if config.interval == "step"]
        self._after_step = [config for config in of_steps if config.monitor is None]
        self._after_validation = [config for config in of_steps if config.monitor is not None]
        self.step_with_batches = bool(of_steps)
        self._after_epoch = [config for config in configs if config.interval == "epoch"]

    def after_step(self, count: int) -> None:
        """Step schedulers that are due after an optimizer step, from the number of steps."""
        self._step(self._after_step, count)

    def after_validation(self, count: int) -> None:
        """Step schedulers that monitor a value and are due after an optimizer step, from the number of steps."""
        self._step(self._after_validation, count)

    def after_epoch(self, count: int) -> None:
        """Step schedulers that are due after an epoch, from the number of completed epochs."""
        self._step(self._after_epoch, count)

    def _step(self, configs: Sequence[SchedulerConfig], count: int) -> None:
        for config in configs:
            if count % config.frequency != 0:
                continue
            if config.monitor is None:
                self._step_one(config.scheduler, None)
            elif (value := self._monitored_value(config, config.monitor)) is not None:
                self._step_one(config.scheduler, value)

    def _monitored_value(self, config: SchedulerConfig, name: str) -> Any | None:
        """Return the value that a scheduler monitors, the same on all ranks; None if it was not logged; collective.

        Raises:
            MisuseError: It was not logged, and the scheduler is strict.
        """
        metrics, strategy = self._run.metrics.callback_values, self._run.strategy
        value = metrics.get(name)
        if strategy.world_size > 1:
            # Of rank 0: values that are not reduced differ between ranks, and all must have the same learning rates.
            score = strategy.broadcast(None if value is None or not strategy.is_global_zero else float(value))
            value = None if score is None else torch.tensor(score, dtype=torch.float64)
        if value is None and config.strict:
            by = " by rank 0, whose value all ranks take" if strategy.world_size > 1 else ""
            raise MisuseError(
                f"the scheduler {type(config.scheduler).__name__} monitors {name!r}, which was not logged{by}; "
                f"logged were: {', '.join(sorted(metrics)) or 'no values'}; log it, or change 'monitor' in "
                "configure_optimizers"
            )
        return value


# Validation during a fit


class ValidationSchedule:
    """The batches after which validation is due.

    Args:
        run: Has ``val_check_interval`` and ``check_val_every_n_epoch``.
        num_batches: Number of training batches in an epoch; None if it is unknown.

    Attributes:
        settings: The settings that the schedule is of.

    Raises:
        MisuseError: Validation would never run.
    """

    def __init__(self, run: Run, num_batches: int | None) -> None:
        self.settings = run.settings.evaluation
        interval = run.settings.evaluation.val_check_interval
        self._epochs = run.settings.evaluation.check_val_every_n_epoch
        self._batches: int | None = None
        self._seconds: float | None = None
        self._last_time = time.monotonic()
        if run.evaluation_loop is None:  # so that an interval that no epoch reaches is no error
            return
        if isinstance(interval, int | float):
            if interval != 1.0 or isinstance(interval, int):  # 1.0 is the end of the epoch, 1 is each batch
                self._batches = self._count(interval, num_batches)
        elif interval is not None:
            self._seconds = read_duration(interval, "val_check_interval").total_seconds()

    def _count(self, interval: float, num_batches: int | None) -> int:
        if self._epochs is not None and num_batches and interval > num_batches:  # with 0 there is no training at all
            raise MisuseError(
                f"val_check_interval={interval!r} is more than the {num_batches} training batches of an epoch: "
                "validation would never run; pass check_val_every_n_epoch=None too, to count batches across epochs"
            )
        if self._epochs is None:
            return int(interval)
        if isinstance(interval, float) and num_batches is not None:
            # At least one: an epoch may be shortened for a trial, and that shows nothing about the interval.
            return max(1, int(interval * num_batches))
        return limit_of(interval, num_batches, "val_check_interval") or 1

    def is_due(self, *, batches_done: int, is_last: bool, epoch: int, batches_seen: int, batches: int = 1) -> bool:
        """Return whether validation is due after a batch, or after the last batch of a call of a compiled step.

        Args:
            batches_done: Number of batches of the epoch, including this one.
            is_last: Whether it is the last one of the epoch.
            epoch: Index of the epoch.
            batches_seen: Number of batches in all epochs, including this one.
            batches: Number of batches in a call of the compiled step; otherwise 1.
        """
        if self._seconds is not None:
            return False  # all ranks decide by their votes, as their clocks differ
        # "<" rather than "== 0": a call of several batches may pass a multiple of the interval.
        if self._epochs is None:
            return is_last if self._batches is None else batches_seen % self._batches < batches
        if (epoch + 1) % self._epochs != 0:
            return False
        return is_last if self._batches is None else batches_done % self._batches < batches

    @property
    def is_timed(self) -> bool:
        """Whether the interval of validation is a time."""
        return self._seconds is not None

    @property
    def time_is_up(self) -> bool:
        """Whether the interval has elapsed in this process."""
        return self._seconds is not None and time.monotonic() - self._last_time >= self._seconds

    def note_run(self) -> None:
        """Restart the interval after a validation."""
        self._last_time = time.monotonic()
