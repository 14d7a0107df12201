"""Stepping learning-rate schedulers when they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.training.dispatch import hook_of
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.interfaces.optimization import SchedulerConfig
    from dstrat.training.trainer import Trainer


class SchedulerSteps:
    """Steps the schedulers of automatic optimization; in manual optimization the module does so itself.

    Those that watch a value are stepped after validation, which may have logged it.

    Args:
        trainer: Has the schedulers and the monitored values.
        module: Has the hook that steps one.

    Attributes:
        step_with_batches: Whether any is stepped during epochs.
    """

    def __init__(self, trainer: Trainer, module: TrainModule) -> None:
        self._trainer = trainer
        self._step_one = hook_of(module, "lr_scheduler_step", TrainModule)
        configs = trainer.strategy.lr_schedulers if module.automatic_optimization else []
        of_steps = [config for config in configs if config.interval == "step"]
        self._after_step = [config for config in of_steps if config.monitor is None]
        self._after_validation = [config for config in of_steps if config.monitor is not None]
        self.step_with_batches = bool(of_steps)
        self._after_epoch = [config for config in configs if config.interval == "epoch"]

    def after_step(self, count: int) -> None:
        """Step what is due after an optimizer step, given the number of steps done."""
        self._step(self._after_step, count)

    def after_validation(self, count: int) -> None:
        """Step what watches a value and is due after an optimizer step, when validation may have logged it."""
        self._step(self._after_validation, count)

    def after_epoch(self, count: int) -> None:
        """Step what is due after an epoch, given the number of epochs done."""
        self._step(self._after_epoch, count)

    def _step(self, configs: Sequence[SchedulerConfig], count: int) -> None:
        for config in configs:
            if count % config.frequency != 0:
                continue
            if config.monitor is None:
                self._step_one(config.scheduler, None)
            elif (value := _monitored(config, self._trainer.callback_metrics)) is not None:
                self._step_one(config.scheduler, value)


def _monitored(config: SchedulerConfig, metrics: Mapping[str, Any]) -> Any | None:
    assert config.monitor is not None  # noqa: S101 - checked by the caller
    if config.monitor not in metrics and config.strict:
        raise MisuseError(
            f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged; "
            f"logged were: {', '.join(sorted(metrics)) or 'no values'}"
        )
    return metrics.get(config.monitor)
