"""Stepping learning-rate schedulers when they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.optimization import SchedulerConfig
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


def step_schedulers(trainer: Trainer, module: TrainModule, *, interval: Literal["step", "epoch"], count: int) -> None:
    """Step the schedulers of an interval that are due.

    Args:
        trainer: Has the schedulers and the monitored values.
        module: Has the hook that steps one.
        interval: Which of them.
        count: Number of steps or epochs done.
    """
    for config in trainer.strategy.lr_schedulers:
        if config.interval == interval and count % config.frequency == 0:
            module.lr_scheduler_step(config.scheduler, _monitored(config, trainer.callback_metrics))


def _monitored(config: SchedulerConfig, metrics: Mapping[str, Any]) -> Any | None:
    if config.monitor is None:
        return None
    if config.monitor not in metrics and config.strict:
        raise MisuseError(
            f"the scheduler {type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged; "
            f"logged were: {', '.join(sorted(metrics)) or 'no values'}"
        )
    return metrics.get(config.monitor)
